"""The catalog entry that `headrace calibrate` writes for a GPU: what was measured, beside what the catalog knew."""

from __future__ import annotations

import kernel_device  # noqa: F401 - chooses between the GPU and the interpreter before kernels are imported
import pytest

from headrace.base.errors import InvalidInput
from headrace.engine.calibrate import GpuCeilings, write_gpu_entry
from headrace.spec import hardware

FOUND = GpuCeilings("NVIDIA H200", 139.8, 4500.0, 4200.0, 790.0, 680.0, 3.1, 1.2)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path))


def test_a_known_card_keeps_what_was_not_measured():
    before = hardware.find("H200")
    path = write_gpu_entry(FOUND)
    after = hardware.find("H200")
    assert after.id == before.id
    assert path.name == f"{before.id}.toml"
    assert after.figures["measured_read_gbs"].value == 4500.0
    assert (after.figures["measured_bf16_tflops"].low, after.figures["measured_bf16_tflops"].high) == (680.0, 790.0)
    assert after.figures["measured_copy_gbs"].grade == "measured"
    for name in ("bandwidth_gbs", "bf16_tflops", "link_gbs", "price_usd_h"):
        assert after.figures[name].value == pytest.approx(before.figures[name].value)
    assert after.figures["fp4_tflops"].absent == before.figures["fp4_tflops"].absent
    assert after.link == before.link
    assert "3.1 us" in after.notes


def test_an_unknown_card_gets_an_entry_of_its_own():
    found = GpuCeilings("NVIDIA Imaginary 9000", 31.5, 900.0, 850.0, 200.0, 150.0, 3.0, 1.0)
    write_gpu_entry(found, price_usd_h=1.5)
    gpu = hardware.find("nvidia-imaginary-9000")
    assert gpu.figures["bandwidth_gbs"].value == 900.0
    assert gpu.figures["price_usd_h"].value == 1.5
    assert gpu.max_linked_gpus == 1
    with pytest.raises(InvalidInput, match="lower case"):
        write_gpu_entry(found, "No Such Name")
