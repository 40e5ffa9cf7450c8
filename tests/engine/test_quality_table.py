"""The generated table says what the records say, and only what is surely so is called dominated."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "quality" / "table.py"
spec = importlib.util.spec_from_file_location("quality_table", SCRIPT)
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)


def point(value: float, half: float = 0.0) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


def entry(weights: str, size: int, speed: float, kl: float, **changes) -> dict:
    return {
        "backend": "native", "asked_weights": weights, "asked_kv": "auto", "weights": weights, "kv": "fp16",
        "weight_bytes": size, "kv_bytes_per_token": 100, "perplexity": point(20.0), "perplexity_ratio": point(1.01, 0.002),
        "kl_nats": point(kl, kl / 10), "flip_rate": point(0.02), "agreement_tokens": point(30.0),
        "agreement_whole": point(0.5), "accuracy": point(0.7), "accuracy_normalized": point(0.75), "changed_picks": point(0.0),
        "speed": {
            "prompt_tokens_per_s": point(500.0, 5), "decode_tokens_per_s": point(speed, 1.0), "prompt_tokens": 512,
            "decode_tokens": 63, "repeats": 5,
        },
        "notes": [],
    } | changes  # fmt: skip


def record(*formats: dict) -> dict:
    return {
        "model": "toy", "settings": {},
        "runs": [{
            "command": "python benchmarks/quality/run.py toy native", "date": "2026-01-01", "seconds": 1.0,
            "machine": {"cpu": "a CPU"},
        }],
        "speed": {
            "command": "python benchmarks/quality/speed.py", "date": "2026-01-02", "threads": 2, "load_1m": [0.1, 0.4],
            "machine": {"cpu": "a CPU", "cpus": 2},
        },
        "report": {
            "model": "toy", "text": "a text", "window": 512, "stride": 256, "windows": 3, "scored_tokens": 1000, "prompts": 4,
            "prompt_tokens": 48, "agreement_limit": 64, "questions": 60, "reference": "fp32 by torch",
            "unquantized": entry("fp32", 4000, 10.0, 0.0), "formats": list(formats),
        },
    }  # fmt: skip


def dominated(*formats: dict) -> list[str | None]:
    return [row["dominated_by"] for row in table.rows(record(*formats))[1:]]


def test_smaller_as_fast_and_as_good_dominates_and_a_trade_does_not() -> None:
    assert dominated(entry("a", 1000, 20, 0.01), entry("b", 900, 20, 0.01)) == ["native b / fp16", None]
    assert dominated(entry("a", 1000, 20, 0.01), entry("b", 900, 20, 0.02)) == [None, None]
    assert dominated(entry("a", 1000, 20, 0.01), entry("b", 900, 19, 0.01)) == [None, None]


def test_equal_bytes_need_a_difference_that_is_sure() -> None:
    assert dominated(entry("a", 1000, 20, 0.01), entry("b", 1000, 21, 0.01)) == [None, None]
    assert dominated(entry("a", 1000, 20, 0.01), entry("b", 1000, 23, 0.01)) == ["native b / fp16", None]
    assert dominated(entry("a", 1000, 20, 0.02), entry("b", 1000, 20, 0.01)) == ["native b / fp16", None]


def test_the_reference_neither_dominates_nor_is_dominated_and_repeats_are_left_out() -> None:
    found = table.rows(record(entry("a", 5000, 5, 0.01), entry("a", 5000, 5, 0.01)))
    assert [row["dominated_by"] for row in found] == [None, None]
    assert [row["reference"] for row in found] == [True, False]


@pytest.fixture
def place(tmp_path):
    records, page = tmp_path / "records", tmp_path / "page.md"
    records.mkdir()
    (records / "toy-native.json").write_text(
        json.dumps(record(entry("int4", 1000, 20, 0.01), entry("int8", 2000, 15, 0.02)))
    )
    page.write_text("# Formats\n\nText.\n")
    return ["--records", str(records), "--page", str(page)], records, page


def test_the_section_is_written_once_and_checked(place, capsys) -> None:
    arguments, records, page = place
    assert table.main([*arguments, "--check"]) == 1
    assert page.read_text() == "# Formats\n\nText.\n"
    assert table.main(arguments) == 0
    written = page.read_text()
    assert written.startswith("# Formats\n\nText.\n")
    assert (
        "| **native int4 / fp16** | 0.0 MB | 100 B | 500 (495–505) | 20.0 (19.0–21.0) | 1.0100 (1.0080–1.0120) |"
        in written
    )
    assert "| native int8 / fp16 |" in written
    assert "2026-01-02, `python benchmarks/quality/speed.py`; load average before each at most 0.4." in written
    assert table.main(arguments) == 0
    assert page.read_text() == written
    assert table.main([*arguments, "--check"]) == 0
    rows = json.loads((records / "table.json").read_text())
    assert [row["dominated_by"] for row in rows] == [None, None, "native int4 / fp16"]

    changed = copy.deepcopy(json.loads((records / "toy-native.json").read_text()))
    changed["report"]["formats"][0]["weight_bytes"] = 3_000_000
    (records / "toy-native.json").write_text(json.dumps(changed))
    assert table.main([*arguments, "--check"]) == 1
    assert table.main(arguments) == 0
    assert "3.0 MB" in page.read_text()


def test_what_stands_behind_the_section_stays(place) -> None:
    arguments, _, page = place
    page.write_text(f"# A\n\n{table.BEGIN}\noutdated\n{table.END}\n\n## B\n")
    assert table.main(arguments) == 0
    text = page.read_text()
    assert text.endswith("## B\n")
    assert "outdated" not in text
    page.write_text(f"# A\n\n{table.BEGIN}\noutdated\n")
    with pytest.raises(SystemExit, match="behind it"):
        table.main(arguments)


@pytest.mark.skipif(not table.load(table.RECORDS), reason="no records of quality yet")
def test_the_page_is_what_the_records_say() -> None:
    assert table.main(["--check"]) == 0


def test_rows_without_a_speed_are_shown_and_never_dominate() -> None:
    found = record(entry("a", 1000, 20, 0.02) | {"speed": None}, entry("b", 900, 20, 0.01) | {"speed": None})
    found["speed"] = None
    assert [row["dominated_by"] for row in table.rows(found)] == [None, None, None]
    text = table.section([found])
    assert "Speeds are not measured yet." in text
    assert "| – | – |" in text
