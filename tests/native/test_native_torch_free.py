"""The native backend runs in a process that never imports torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_ENGINE = """
import json, sys
from headrace.control.request import Sampling
from headrace.engine.launch import launch
from headrace.spec.config import EngineConfig
from headrace.control.step import BlockAppend, Chunk, SlotInit, StepPlan

core = launch(EngineConfig(model="smollm2-135m", backend="native", kv_bytes=64 * 2**20, max_model_len=512))
prompt = tuple(range(100, 140))
plan = StepPlan(
    1,
    inits=(SlotInit(0, "a", prompt, len(prompt), Sampling(max_tokens=3, temperature=0.7, top_p=0.9, logprobs=2)),),
    appends=(BlockAppend(0, 0, 0, (3, 1, 2)),),
    chunks=(Chunk(0, 0, len(prompt), True),),
)
row = core.executor.submit(plan).result().rows[0]
core.executor.close()
heavy = [m for m in ("torch", "transformers", "scipy", "altair", "pandas") if m in sys.modules]
items = {i.name: [i.predicted_bytes, i.actual_bytes] for i in core.info.memory}
print(json.dumps({"heavy": heavy, "tokens": len(row.token_ids), "items": items, "backend": core.info.backend}))
"""


@pytest.mark.model
def test_an_engine_runs_without_torch_and_predicts_its_bytes():
    done = subprocess.run([sys.executable, "-c", _ENGINE], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert found["heavy"] == []
    assert found["tokens"] == 1
    assert found["backend"] == "native"
    for predicted, actual in found["items"].values():
        assert predicted == actual
    # The Q4_1 file stays what it is: its embedding is stored in 8 bits, everything else in 4.
    assert found["items"]["weights"][1] < 97e6


def test_without_the_extension_the_reason_says_how_to_get_it():
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'headrace_native':\n"
        "            raise ModuleNotFoundError(name)\n"
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'headrace_native' else real(name, *a)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from headrace.engine.launch import choose_backend\n"
        "from headrace.spec.config import EngineConfig\n"
        "from headrace.spec.locate import locate\n"
        "backend, notes = choose_backend(EngineConfig(model='smollm2-135m'), locate('smollm2-135m'))\n"
        "print(backend.name, notes)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("torch ")
    assert "headrace-native is not installed" in done.stdout
    assert "pip install" in done.stdout
