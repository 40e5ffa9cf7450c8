"""The hardware catalog: every figure sourced, usable memory, dense peaks, honest prices."""

import datetime

import pytest

from headrace.base.errors import InvalidInput
from headrace.base.units import GB, GIB
from headrace.spec import hardware

IDS = [
    "t4-16",
    "l4-24",
    "a10g-24",
    "a40-48",
    "rtx-3090-24",
    "rtx-4090-24",
    "rtx-5090-32",
    "rtx-pro-6000-96",
    "l40s-48",
    "a100-sxm-40",
    "a100-sxm-80",
    "h100-pcie-80",
    "h100-sxm-80",
    "h200-sxm-141",
    "b200-sxm-180",
    "gb200-192",
    "b300-sxm-288",
    "mi300x-192",
    "mi325x-256",
    "mi355x-288",
]


def test_all_twenty_are_there():
    assert set(IDS) <= set(hardware.catalog())


@pytest.mark.parametrize("gpu_id", IDS)
def test_every_figure_has_source_and_date(gpu_id):
    gpu = hardware.find(gpu_id)
    for name, figure in gpu.figures.items():
        assert figure.source, name
        assert figure.date[:2] == "20", name
        if figure.value is None:
            assert figure.absent, name
        else:
            assert figure.low <= figure.value <= figure.high


@pytest.mark.parametrize("gpu_id", IDS)
def test_marketing_gb_are_not_usable_gib(gpu_id):
    gpu = hardware.find(gpu_id)
    assert gpu.memory_bytes < gpu.memory_gb_marketing * GIB


def test_sparse_tflops_are_not_taken_for_dense():
    h100 = hardware.find("h100-sxm-80")
    assert h100.peak_flops("bf16") == 989e12
    assert h100.peak_flops("fp8") == 1979e12
    assert hardware.find("l4-24").peak_flops("fp8") == 242e12


def test_uncertain_cells_keep_their_uncertainty():
    b300 = hardware.find("b300-sxm-288").figure("bandwidth_gbs")
    assert (b300.low, b300.high) == (7750, 8000)
    assert hardware.find("t4-16").figure("memory_gib").grade == "guess"
    rtx_pro = hardware.find("rtx-pro-6000-96").figure("bf16_tflops")
    assert rtx_pro.low < 467.8 < rtx_pro.high


def test_absent_units_say_why():
    t4 = hardware.find("t4-16")
    assert t4.peak_flops("bf16") is None
    assert t4.peak_flops("fp16") == 65e12
    with pytest.raises(InvalidInput, match="not supported"):
        t4.figure("fp8_tflops")


@pytest.mark.parametrize(
    ("spelling", "gpu_id"),
    [
        ("h100_sxm", "h100-sxm-80"),
        ("H100-80GB SXM", "h100-sxm-80"),
        ("b200_sxm", "b200-sxm-180"),
        ("GB200-192GB", "gb200-192"),
        ("gb200", "gb200-192"),
        ("b300_sxm", "b300-sxm-288"),
        ("RTX 3090 (23.58 GiB)", "rtx-3090-24"),
        ("A40 46068 MiB", "a40-48"),
        ("T4-16GB", "t4-16"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80"),
        ("AMD Instinct MI300X", "mi300x-192"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24"),
        ("8xH200", "h200-sxm-141"),
        ("NVIDIA GB200", "gb200-192"),
        ("h100x8", "h100-sxm-80"),
        ("RTX 4090 x2", "rtx-4090-24"),
        ("H100-80GB x8", "h100-sxm-80"),
        ("RTX4090", "rtx-4090-24"),
        ("GeForce RTX 3090", "rtx-3090-24"),
        ("H100-80GB (79.18 gib)", "h100-sxm-80"),
        ("AMD Instinct MI300X OAM", "mi300x-192"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-96"),
    ],
)
def test_spellings(spelling, gpu_id):
    assert hardware.find(spelling).id == gpu_id


def test_a_stated_size_wins_and_logged_gb_are_binary():
    assert hardware.find("H100-80GB (79.18 GiB)").memory_bytes == round(79.18 * GIB)
    assert hardware.find("H200 (140.4 GB)").memory_bytes == round(140.4 * GIB)
    assert hardware.find("H200 (150 GB)").memory_bytes == round(150 * GB)


def test_unknown_gpu_suggests():
    with pytest.raises(InvalidInput, match="h100-sxm-80") as caught:
        hardware.find("h100-smx")
    assert caught.value.field == "gpu"


@pytest.mark.parametrize(
    "other", ["H100 NVL", "GH200-96GB", "GB300", "H20", "A100-PCIE-40GB", "RTX 6000 Ada", "L40", "A10"]
)
def test_a_card_that_only_sounds_like_another_is_not_it(other):
    with pytest.raises(InvalidInput, match="unknown GPU"):
        hardware.find(other)


def test_prices_age_and_can_be_overridden():
    h100 = hardware.find("h100-sxm-80")
    assert h100.price_warning(datetime.date(2026, 5, 20)) is None
    assert "2026-05" in h100.price_warning(datetime.date(2027, 1, 1))
    assert h100.price(1.5).value == 1.5
    assert hardware.find("mi355x-288").price() is None
    assert "no price" in hardware.find("mi355x-288").price_warning()
    with pytest.raises(InvalidInput, match="price"):
        h100.price(-1)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("source = ", "sauce = "), "source"),
        (("value = 79.2", "value = -1"), "value"),
        (('link = "nvlink"', 'link = "string"'), "link"),
        (('id = "h100-sxm-80"\n', ""), "id"),
    ],
)
def test_a_broken_entry_is_refused(change, field):
    from importlib import resources

    text = resources.files("headrace.spec").joinpath("gpus/h100-sxm-80.toml").read_text()
    assert change[0] in text
    with pytest.raises(InvalidInput) as caught:
        hardware.parse(text.replace(*change), "broken.toml")
    assert caught.value.field == field


def test_calibrated_entries_join_the_catalog(tmp_path, monkeypatch):
    from headrace.plan.ceilings import Ceilings, write_entry

    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path))
    write_entry("my-cpu", Ceilings(20.0, 0.5, 16.0, "numpy, fp32"), 0.1)
    gpu = hardware.find("my-cpu")
    assert gpu.bandwidth == 20e9
    assert gpu.peak_flops("bf16") == 0.5e12
    assert gpu.figure("bandwidth_gbs").grade == "measured"
    assert gpu.price().value == 0.1
    with pytest.raises(InvalidInput, match="name"):
        write_entry("../evil", Ceilings(1, 1, 1, ""))
    for price in (0.0, float("inf"), float("nan")):
        with pytest.raises(InvalidInput, match="price"):
            write_entry("my-cpu", Ceilings(20.0, 0.5, 16.0, "numpy, fp32"), price)


def test_ceilings_are_measured(monkeypatch):
    from headrace.plan import ceilings

    for seconds in (0.0, float("inf"), float("nan")):
        with pytest.raises(InvalidInput, match="seconds"):
            ceilings.measure(seconds)

    monkeypatch.setattr(ceilings, "SIZE_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "SIDE", 64)
    monkeypatch.setattr(ceilings, "_torch_flops", lambda seconds: 0.0)
    found = ceilings.measure(0.01)
    assert found.bandwidth_gbs > 0
    assert found.tflops > 0
    assert found.memory_gib > 0
