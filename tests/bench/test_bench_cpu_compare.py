"""The comparison with AVX2 alone leaves out what used more, and keeps its figures apart from others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cpu" / "serve.py"


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--out", str(folder), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def row(engine: str, repeat: int, rate: float, share: float) -> str:
    figures = {
        "engine": engine,
        "work": "prefill",
        "repeat": repeat,
        "prefill_tokens_per_s": rate,
        "foreign_cores": 0.0,
    }
    return json.dumps(figures | {"instructions": "avx2", "avx512_share": share}) + "\n"


def test_figures_with_avx512_are_left_out_and_kept_apart(tmp_path: Path) -> None:
    rows = [
        row("headrace-native", r, 900.0, 0.01) + row("openvino-Q8_0", r, rate, share)
        for r, rate, share in ((0, 300.0, 0.0), (1, 800.0, 1.0))
    ]
    (tmp_path / "raw.jsonl").write_text("".join(rows))
    assert run(tmp_path, "--summarize").returncode == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["instructions"] == {"allowed": ["avx2"], "left_out_for_avx512": 1}
    assert summary["ratios"]["prefill"]["headrace-native"]["openvino-Q8_0"]["value"] == 3.0
    refused = run(tmp_path)
    assert refused.returncode == 2
    assert "other instructions" in refused.stderr
