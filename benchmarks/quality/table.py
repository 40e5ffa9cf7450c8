"""Generate the table "format → bytes, speed, loss" of `docs/quantization.md` from the records of `run.py` and `speed.py`.

python benchmarks/quality/table.py            # write the section, and table.json beside the records
python benchmarks/quality/table.py --check    # fail if either is not what the records say
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records" / "quality"
PAGE = ROOT / "docs" / "quantization.md"
BEGIN, END = "<!-- generated: quality -->", "<!-- end -->"
HEAD = (
    "format (weights / KV)", "weights", "KV per token", "prompt tok/s", "answer tok/s", "perplexity ×", "KL, nats", "flips",
    "greedy agreement", "accuracy",
)  # fmt: skip
Row = dict[str, Any]


def load(folder: Path) -> list[dict[str, Any]]:
    """All records, by model, then backend."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.name != "table.json"]
    return sorted(found, key=lambda r: (r["report"]["model"], r["report"]["formats"][0]["backend"]))


def rows(record: dict[str, Any]) -> list[Row]:
    """One row per format, the reference first; `dominated_by` names a format that is better in bytes, speed and loss."""
    report = record["report"]
    found, seen = [], set()
    for i, f in enumerate((report["unquantized"], *report["formats"])):
        key = (f["backend"], f["weights"], f["kv"], f["weight_bytes"])  # two names may ask for the same
        if i and key in seen:
            continue
        seen.add(key)
        found.append({"model": report["model"], "reference": i == 0} | f)
    for row in found:
        better = [other for other in found if not other["reference"] and _dominates(other, row)]
        row["dominated_by"] = _name(better[0]) if better and not row["reference"] else None
    return found


def _dominates(a: Row, b: Row) -> bool:
    """Whether `a` is no worse than `b` in all of bytes, decode speed and loss, and surely better in one of them.

    Speeds and losses differ surely where their intervals do not meet; bytes are exact.
    """
    if a is b or a["speed"] is None or b["speed"] is None:
        return False
    bytes_a, bytes_b = ((r["weight_bytes"], r["kv_bytes_per_token"]) for r in (a, b))
    speed_a, speed_b = (r["speed"]["decode_tokens_per_s"] for r in (a, b))
    if any(x > y for x, y in zip(bytes_a, bytes_b, strict=True)):
        return False
    if speed_a["value"] < speed_b["value"] or a["kl_nats"]["value"] > b["kl_nats"]["value"]:
        return False
    return bytes_a != bytes_b or speed_a["low"] > speed_b["high"] or a["kl_nats"]["high"] < b["kl_nats"]["low"]


def _name(row: Row) -> str:
    weights = (
        row["asked_weights"] if row["asked_weights"] == row["weights"] else f"{row['asked_weights']} = {row['weights']}"
    )
    return f"{row['backend']} {weights} / {row['kv']}"


def _spread(interval: dict[str, float], form: str) -> str:
    return f"{interval['value']:{form}} ({interval['low']:{form}}–{interval['high']:{form}})"


def _cells(row: Row) -> list[str]:
    name = _name(row)
    if row["reference"]:
        name += " (reference)"
    elif row["dominated_by"] is None and row["speed"] is not None:
        name = f"**{name}**"
    speed = row["speed"]
    return [
        name,
        f"{row['weight_bytes'] / 1e6:,.1f} MB",
        f"{row['kv_bytes_per_token']:,} B",
        "–" if speed is None else _spread(speed["prompt_tokens_per_s"], ",.0f"),
        "–" if speed is None else _spread(speed["decode_tokens_per_s"], ",.1f"),
        _spread(row["perplexity_ratio"], ".4f"),
        _spread(row["kl_nats"], ".2g"),
        _spread(row["flip_rate"], ".1%"),
        _spread(row["agreement_tokens"], ".1f"),
        _spread(row["accuracy_normalized"], ".0%"),
    ]


def _measured(record: dict[str, Any]) -> str:
    """When, where and by which commands losses and speeds were measured."""
    runs, speed = record["runs"], record["speed"]
    commands = ", ".join(f"`{c}`" for c in dict.fromkeys(run["command"] for run in runs))
    losses = f"Losses: {runs[0]['machine']['cpu']}, {', '.join(sorted({run['date'] for run in runs}))}, {commands}."
    if speed is None:
        return f"{losses} Speeds are not measured yet."
    return (
        f"{losses} Speeds: {speed['machine']['cpu']}, {speed['threads']} threads on {speed['machine']['cpus']} CPUs, "
        f"{speed['date']}, `{speed['command']}`; load average before each at most {max(speed['load_1m']):.1f}."
    )


def section(records: list[dict[str, Any]]) -> str:
    """The Markdown between the marks."""
    if not records:
        return "No records yet."
    parts = []
    for record in records:
        report = record["report"]
        table = [_cells(row) for row in rows(record)]
        parts += [
            f"### {report['model']}, {report['formats'][0]['backend']} backend\n",
            f"Reference: {report['reference']}; its perplexity is {_spread(report['unquantized']['perplexity'], '.2f')}. "
            f"{report['scored_tokens']:,} tokens of {report['text']} in {report['windows']} windows of {report['window']}, "
            f"stride {report['stride']}; {report['prompts']} greedy answers of {report['agreement_limit']} tokens; "
            f"{report['questions']} questions. {_measured(record)}\n",
            "| " + " | ".join(HEAD) + " |",
            "|---" + "|---:" * (len(HEAD) - 1) + "|",
            *("| " + " | ".join(cells) + " |" for cells in table),
            "",
        ]
    parts.append(
        "In brackets 95 % intervals, resampled over windows, answers, questions or repeats. Speed is one sequence alone on the "
        "executor: a prompt of one window, and an answer. Bold: no other format of the table is as good in bytes, answer speed "
        "and KL and better in one of them; not said of rows without a speed."
    )
    return "\n".join(parts)


def placed(page: str, text: str) -> str:
    """The page with `text` between the marks, which are added at its end if it has none."""
    if BEGIN not in page:
        page = page.rstrip("\n") + f"\n\n## Bytes, speed and loss, measured\n\n{BEGIN}\n{END}\n"
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{BEGIN} has no {END} behind it")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if something would change")
    a = parser.parse_args(argv)
    records = load(a.records)
    page = a.page.read_text() if a.page.exists() else "# Quantization\n"
    wanted = {
        a.page: placed(page, section(records)),
        a.records / "table.json": json.dumps([row for r in records for row in rows(r)], indent=1) + "\n",
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if a.check:
        for path in stale:
            print(f"{path} is not what the records say; run benchmarks/quality/table.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
