"""A plan beside what was measured: each predicted figure with the ratio, so that a run also tests the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import InvalidInput
from headrace.base.files import write_atomic
from headrace.bench.records import SUMMARY_FILE
from headrace.spec.prediction import Figure, Prediction

_COMPARED = (
    # name in the prediction, key and statistic in the summary, factor from summary to prediction
    ("ttft_ms", "ttft_s", "mean", 1e3),
    ("tpot_ms", "tpot_s", "mean", 1e3),
    ("output_tokens_per_s", "output_tokens_per_s", "value", 1.0),
    ("usd_per_million_output_tokens", "usd_per_million_output_tokens", "value", 1.0),
)


def read_prediction(path: Path) -> Prediction:
    """A prediction from a file written by `headrace plan perf --json` (its figures) or one of our own records."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidInput(f"cannot read a plan from {path}: {error}", field="--plan") from None
    if not isinstance(raw, dict):
        raise InvalidInput(f"{path} holds no plan", field="--plan")
    raw.setdefault("subject", path.name)
    known = {f.name for f in msgspec.structs.fields(Prediction)}
    try:
        found = msgspec.convert({k: v for k, v in raw.items() if k in known}, Prediction)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{path} holds no plan: {error}", field="--plan") from None
    if not any(isinstance(getattr(found, name), Figure) for name, *_ in _COMPARED):
        raise InvalidInput(f"{path} predicts none of {', '.join(c[0] for c in _COMPARED)}", field="--plan")
    return found


def traffic_of(summary: dict[str, Any]) -> dict[str, Any]:
    """What a planner needs to know of a run's traffic: mean lengths, mean requests in flight, prefix hits."""
    ok = max(1, summary["requests"]["ok"])
    tokens, e2e = summary["tokens"], summary.get("e2e_s") or {"mean": 0.0, "count": 0}
    return {
        "isl": max(1, round(tokens["prompt"] / ok)),
        "osl": max(1, round(tokens["output"] / ok)),
        "concurrency": max(1, round(e2e["mean"] * e2e["count"] / summary["duration_s"]))
        if summary["duration_s"]
        else 1,
        "prefix_hit_rate": (summary.get("prefix_hit") or {}).get("share") or 0.0,
    }


def beside(summary: dict[str, Any], prediction: Prediction) -> dict[str, Any]:
    """The predicted figures with the measured ones: planned, its interval and grade, measured, measured over planned."""
    rows = []
    for name, key, statistic, factor in _COMPARED:
        figure: Figure | None = getattr(prediction, name)
        measured = (summary.get(key) or {}).get(statistic)
        if figure is None or measured is None:
            continue
        value = measured * factor
        rows.append(
            {
                "name": name,
                "planned": figure.value,
                "low": figure.low,
                "high": figure.high,
                "grade": figure.grade,
                "measured": value,
                "ratio": value / figure.value,
                "within": figure.low <= value <= figure.high,
            }
        )
    return {"subject": prediction.subject, "figures": rows, "notes": list(prediction.notes)}


def set_beside(out: Path, summary: dict[str, Any], prediction: Prediction) -> dict[str, Any]:
    """Add `plan` to a summary and to its file."""
    summary = summary | {"plan": beside(summary, prediction)}
    write_atomic(out / SUMMARY_FILE, msgspec.json.format(msgspec.json.encode(summary), indent=1))
    return summary
