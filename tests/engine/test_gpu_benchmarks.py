"""What benchmarks of the GPU are asked, as far as that can be tested without one."""

import importlib.util
import json
from pathlib import Path

import pytest

from headrace.engine.cuda.pool import FORMATS
from headrace.spec.accounting import cache_layout, default_block_tokens
from headrace.spec.hf import spec_from_hf

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "kv_formats.py"
MISTRAL = Path(__file__).parents[2] / "src" / "headrace" / "spec" / "models" / "mistral-7b.json"
spec = importlib.util.spec_from_file_location("gpu_kv_formats", SCRIPT)
kv_formats = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kv_formats)


def test_every_coded_format_is_timed_beside_bf16():
    asked = kv_formats.arguments(["model"])
    assert asked.kv == ["bf16", *(name for name in FORMATS if name not in ("bf16", "fp16", "fp32"))]
    assert (asked.model, asked.repeats) == ("model", 3)
    assert kv_formats.arguments(["model", "1", "--kv", "bf16", "int4"]).kv == ["bf16", "int4"]
    with pytest.raises(SystemExit):
        kv_formats.arguments(["model", "--kv", "int3"])


def test_the_pools_of_all_formats_fit_beside_each_other_and_hold_the_steps():
    """On the card of the record: 139 GiB, 14.5 GB of them weights in bf16."""
    model = spec_from_hf(json.loads(MISTRAL.read_text())["config"], "mistral-7b")
    asked = kv_formats.arguments(["model"])
    total = 0
    for name in asked.kv:
        size = default_block_tokens(name)
        layout = cache_layout(model, name, size)
        assert layout.kv_precision == name
        blocks = min(int(asked.pool_gb * 1e9) // layout.bytes_per_block, kv_formats.largest_step() // size)
        total += blocks * layout.bytes_per_block
        assert blocks * size >= 16 * (16384 + kv_formats.ROOM), name
        if name != "bf16":
            assert blocks * size >= 32 * (16384 + kv_formats.ROOM), name
    assert total < 130e9
