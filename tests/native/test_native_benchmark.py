"""The benchmark of steps runs against the engine as it is: a few small points, whose times nobody judges here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("headrace_native")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cpu" / "native.py"


def test_a_quick_run_measures_steps_and_prompts(tmp_path):
    out = tmp_path / "quick"
    ran = subprocess.run([sys.executable, SCRIPT, "--quick", "--out", out], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    record = json.loads(out.read_text())
    assert {(row["batch"], row["context"]) for row in record["decode"]} >= {(1, 128), (8, 512)}
    assert all(row["best_ms"] > 0 for row in record["decode"] + record["prefill"])
