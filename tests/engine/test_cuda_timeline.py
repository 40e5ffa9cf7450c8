"""The profile's table from kernel records."""

from __future__ import annotations

import re
from pathlib import Path

import kernel_device  # noqa: F401
import pytest

from headrace.engine import cuda
from headrace.engine.cuda.timeline import kind_of, summed


def test_kernels_are_summed_by_kind_per_step():
    events = [
        ("_skinny", 0.0, 4.0),
        ("nvjet_sm90_tst_64x64", 5.0, 8.0),
        ("_decode", 8.0, 10.0),
        ("Memcpy HtoD (Pinned -> Device)", 10.0, 11.0),
        ("strange", 19.0, 20.0),
    ]
    kinds, span = summed(events, 2)
    assert {k.kind: (k.us, k.launches) for k in kinds} == {
        "gemm": (3.5, 1.0),
        "attention": (1.0, 0.5),
        "copies": (0.5, 0.5),
        "other": (0.5, 0.5),
    }
    assert span == 10.0
    assert summed([], 1) == ([], 0.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_prefill_hopper", "attention"),
        ("_gather", "copies"),
        ("_rope_cache", "rope and cache"),
        ("_add_norm", "norm"),
        ("_greedy", "sampling"),
    ],
)
def test_own_kernels_have_a_kind(name, kind):
    assert kind_of(name) == kind


def test_every_kernel_that_is_launched_has_a_kind():
    root = Path(cuda.__file__).parents[1]
    text = "\n".join(p.read_text() for folder in ("kernels", "cuda") for p in (root / folder).glob("*.py"))
    launched = set(re.findall(r"^ +(?:\w+\.)?(\w+)\[\(.*\)\]\($", text, re.MULTILINE))
    assert {"_skinny", "_decode_hopper", "_quantized", "kernel"} <= launched
    assert not {name for name in launched if kind_of(name) == "other"}
    assert kind_of("void at::native::elementwise_kernel") == "other"
