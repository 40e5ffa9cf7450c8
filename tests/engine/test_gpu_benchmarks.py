"""What benchmarks of the GPU are asked, as far as that can be tested without one."""

import importlib.util
import json
from pathlib import Path

import pytest

from headrace.engine.cuda.pool import FORMATS
from headrace.spec.accounting import cache_layout, default_block_tokens
from headrace.spec.hf import spec_from_hf

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"
MISTRAL = Path(__file__).parents[2] / "src" / "headrace" / "spec" / "models" / "mistral-7b.json"


def script(name: str):
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kv_formats, start = script("kv_formats"), script("start")


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


def test_starts_take_turns_and_options():
    assert start.asked([])[0].count("processes") == 2
    assert start.asked(["processes", "warm", "kv=fp8"]) == (["processes", "warm"], ["kv=fp8"])
    for wrong in (["cold"], ["warm", "threads"]):
        with pytest.raises(SystemExit):
            start.asked(wrong)


def test_each_start_has_caches_of_its_own_but_warm_ones(monkeypatch):
    ran = []
    monkeypatch.setattr(start.subprocess, "run", lambda words, env, check: ran.append((words, env, check)))
    start.main("model", ["threads", "warm", "processes", "kv=fp8"])
    caches = [env["TRITON_CACHE_DIR"] for _, env, _ in ran]
    assert caches[0] == caches[1] != caches[2]
    assert [words[2:] for words, _, _ in ran] == [
        ["--one", "model", t, "kv=fp8"] for t in ("threads", "warm", "processes")
    ]
    assert not any(Path(c).parent.exists() for c in caches)
