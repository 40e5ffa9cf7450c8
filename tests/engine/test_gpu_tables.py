"""The tables of GPU stays, from lines made up."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "tables.py"
RECORD = SCRIPT.parents[1] / "records" / "gpu" / "h200-mistral-7b-vs-vllm.json"
spec = importlib.util.spec_from_file_location("gpu_tables", SCRIPT)
tables = importlib.util.module_from_spec(spec)
sys.modules["gpu_tables"] = tables
spec.loader.exec_module(tables)


def stay(ours: list[dict], theirs: list[dict]):
    return tables.Stay({tables.OURS: ours, tables.THEIRS: theirs})


def test_ratios_say_how_far_runs_lie_apart():
    assert tables.ratio([2.0, 3.0], [4.0, 6.0]) == pytest.approx((0.5, 2 / 6, 3 / 4))
    assert tables.ratio_by_draws([2.0, 3.0], [4.0, 6.0]) == pytest.approx((0.5, 0.5, 0.5))
    # The outer two of five count for nothing.
    assert tables.ratio_of_medians([[0.0, 1.0, 2.0, 3.0, 99.0]], [[0.1, 4.0, 4.0, 5.0, 50.0]]) == pytest.approx(
        (0.5, 1 / 5, 3 / 4)
    )


def test_what_misses_is_called_missed():
    lines = [{"step": "mixed256", "out_tok_s": 109.0}, {"step": "uniform", "B": 64, "step_ms": 9.1}]
    theirs = [{"step": "mixed256", "out_tok_s": 100.0}, {"step": "uniform", "B": 64, "step_ms": 10.0}]
    told = "\n".join(tables.compared(stay(lines, theirs)))
    assert "≥ 1.10 | missed by 0.010" in told
    assert "≤ 0.90 | missed by 0.010" in told
    lines[0]["out_tok_s"], lines[1]["step_ms"] = 111.0, 8.9
    assert "missed" not in "\n".join(tables.compared(stay(lines, theirs)))


def test_a_decode_step_reads_weights_and_cached_tokens_once():
    (line,) = [
        row
        for row in tables.rates(stay([{"step": "uniform", "B": 64, "step_ms": 5.0}], []))
        if row.startswith("| batch 64")
    ]
    held = 14.221e9 + 64 * (512 + 257 / 2) * 131072
    cells = [cell.strip(" %") for cell in line.split("|")]
    found = [float(cell) for cell in cells[2:6]]
    assert found == pytest.approx([held / 1e9, 5.0, held / 5e9, 100 * held / 5e9 / 4.574], rel=0.01)


def test_stays_of_the_record_have_their_tables(tmp_path, capsys):
    record = json.loads(RECORD.read_text())
    for name in ("stay D", "stay F", "stay G"):
        assert len(tables.compared(tables.Stay(record["stays"][name]))) > 6, name
    ours, theirs = (tmp_path / name for name in ("ours.log", "vllm.log"))
    ours.write_text('noise\nRES {"step": "ready", "s": 14.0}\nRES {"step": "mixed256", "out_tok_s": 110.5}\n')
    theirs.write_text('RES {"step": "ready", "s": 150.0}\nRES {"step": "mixed256", "out_tok_s": 100.0}\n')
    copy = tmp_path / "record.json"
    copy.write_text(RECORD.read_text())
    tables.main(str(copy), "stay Z", ["--add", str(ours), str(theirs), "0123abc", "2026-12-01"])
    assert "1.105 (1.105–1.105)" in capsys.readouterr().out
    assert json.loads(copy.read_text())["stays"]["stay Z"]["commit"] == "0123abc"
