"""The floors that `headrace profile` prints, against figures worked out by hand, and its table from recorded kernels."""

from __future__ import annotations

import json
from importlib import resources
from types import SimpleNamespace

import kernel_device  # noqa: F401 - chooses between the GPU and the interpreter before kernels are imported
import pytest

from headrace.base.errors import InvalidInput
from headrace.cli.profile import device_spans, table
from headrace.engine.cuda.timeline import KindTime
from headrace.engine.roofline import Ceilings, ceilings, floors, idle_us
from headrace.spec.accounting import Span
from headrace.spec.hf import spec_from_hf

CARD = Ceilings(4.5e12, 670e12, "by hand")


@pytest.fixture(scope="module")
def mistral():
    config = resources.files("headrace.spec").joinpath("models", "mistral-7b.json").read_text()
    return spec_from_hf(json.loads(config)["config"], "mistral-7b")


def test_one_token_of_a_7b_model_is_bound_by_its_bytes(mistral):
    found = floors(mistral, "bf16", "bf16", [Span(1023, 1)], CARD)
    layer = 4096 * 6144 + 4096 * 4096 + 2 * 4096 * 14336 + 14336 * 4096
    weights = 2 * (32 * (layer + 2 * 4096) + 32000 * 4096 + 4096)
    assert found["gemm"] == pytest.approx(1e6 * weights / 4.5e12)
    assert found["attention"] == pytest.approx(1e6 * 1024 * 32 * 2 * 8 * 128 * 2 / 4.5e12)
    assert found["sampling"] == pytest.approx(1e6 * 32000 * 4 / 4.5e12)


def test_a_prompt_of_4096_is_bound_by_its_operations(mistral):
    found = floors(mistral, "bf16", "bf16", [Span(0, 4096)], CARD)
    layer = 4096 * 6144 + 4096 * 4096 + 2 * 4096 * 14336 + 14336 * 4096
    products = 2 * 4096 * 32 * layer + 2 * 32000 * 4096
    assert found["gemm"] == pytest.approx(1e6 * products / 670e12)
    attention = 32 * 4 * 32 * 128 * (4096 * 4097 / 2)
    assert found["attention"] == pytest.approx(1e6 * attention / 670e12)
    assert found["norm"] == pytest.approx(1e6 * 4096 * 32 * 2 * 2 * 4096 * 2 / 4.5e12)
    assert found["activation"] == pytest.approx(1e6 * 4096 * 32 * 3 * 14336 * 2 / 4.5e12)


def test_fewer_bits_are_fewer_bytes(mistral):
    plain = floors(mistral, "bf16", "bf16", [Span(1023, 1)], CARD)
    coded = floors(mistral, "int8", "fp8", [Span(1023, 1)], CARD)
    assert 0.5 < coded["gemm"] / plain["gemm"] < 0.55
    assert coded["attention"] == pytest.approx(plain["attention"] / 2)


def test_a_calibrated_card_is_held_to_what_was_measured():
    found = ceilings("NVIDIA H200")
    assert (found.bytes_s, found.flops_s) == (4574e9, 780e12)
    assert "measured" in found.source
    assert "datasheet" in ceilings("NVIDIA L40S").source
    with pytest.raises(InvalidInput, match="calibrate"):
        ceilings("NVIDIA Imaginary 9000")


def test_idle_time_is_what_no_kernel_covers():
    assert idle_us([(5.0, 9.0), (0.0, 4.0), (1.0, 3.0), (8.0, 12.0), (20.0, 21.0)]) == 1.0 + 8.0
    assert idle_us([]) == 0.0


def test_spans_are_the_devices_alone():
    events = [
        {"ph": "X", "cat": "kernel", "ts": 5.0, "dur": 2.0},
        {"ph": "X", "cat": "cuda_runtime", "ts": 0.0, "dur": 50.0},
        {"ph": "X", "cat": "gpu_memcpy", "ts": 9.0, "dur": 1.0},
        {"ph": "M", "name": "process_name"},
    ]
    assert device_spans({"traceEvents": events}) == [(5.0, 7.0), (9.0, 10.0)]


@pytest.mark.parametrize("card", ["NVIDIA H200", "NVIDIA Imaginary 9000"])
def test_the_table_says_each_kinds_time_beside_its_floor(mistral, card):
    kinds = [KindTime("gemm", 8000.0, 258.0, {}), KindTime("other", 10.0, 2.0, {})]
    watched = SimpleNamespace(
        card=card, plans=[[Span(1023, 1)], [Span(1024, 1)]], kinds=kinds, span_us=8100.0, idle_us=90.0, launch_us=600.0
    )
    lines = table(mistral, "bf16", "bf16", watched)
    found = {line[2:17].strip(): line[17:].split() for line in lines}
    assert found["gemm"][:2] == ["4000.0", "129.0"]
    assert found["idle"][0] == "45.0"
    assert found["whole step"][0] == "4050.0"
    assert found["host"][0] == "300.0"
    assert found["other"] == ["5.0", "1.0"]
    if card == "NVIDIA H200":
        assert "4,574 GB/s" in lines[0]
        assert float(found["gemm"][2]) == pytest.approx(14.22e9 / 4574e3, rel=1e-3)
        assert found["gemm"][3] == "78%"
    else:
        assert "headrace calibrate" in lines[0]
        assert len(found["gemm"]) == 2
