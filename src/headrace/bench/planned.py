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
