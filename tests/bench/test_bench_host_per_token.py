"""The measure of the host's CPU a token still starts the server that it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cpu" / "host_per_token.py"


@pytest.mark.model
def test_tokens_of_the_stub_server_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--streams", "1", "--seconds", "0.3", "--repeats", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    [row] = json.loads(out.read_text())["rows"]
    assert row["events_per_s"] > 0
    assert row["per_token"]["us_per_token"] > 0
