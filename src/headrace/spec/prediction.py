"""Numbers that carry their certainty: a value, a 90 % interval and how it is known."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

Grade = Literal["exact", "measured", "fitted", "datasheet", "guess"]

GRADES: tuple[Grade, ...] = ("exact", "measured", "fitted", "datasheet", "guess")
"""From the surest to the least sure."""


class Figure(msgspec.Struct, frozen=True):
    """A predicted or looked-up number; `low`..`high` is meant to hold the truth nine times in ten.

    `grade`: exact (arithmetic on exact inputs), measured, fitted (a model fitted to public measurements), datasheet
    (a vendor's claim), guess (unverified, or far from anything measured).
    """

    value: float
    low: float
    high: float
    grade: Grade


def exact(value: float) -> Figure:
    """A figure without uncertainty."""
    return Figure(value, value, value, "exact")


def weakest(*grades: Grade) -> Grade:
    """The grade of something derived from all of these."""
    return max(grades, key=GRADES.index)


class Prediction(msgspec.Struct, frozen=True):
    """What the planner expects of one run, in the form that the benchmark compares with what it measured.

    Times in milliseconds, rates in tokens per second, memory in bytes per rank. `subject` names model, GPU and engine.
    """

    subject: str
    ttft_ms: Figure | None = None
    tpot_ms: Figure | None = None
    output_tokens_per_s: Figure | None = None
    output_tokens_per_s_per_gpu: Figure | None = None
    usd_per_million_output_tokens: Figure | None = None
    weights_bytes: Figure | None = None
    kv_pool_bytes: Figure | None = None
    max_users: Figure | None = None
    notes: tuple[str, ...] = ()


def readable(value: float) -> str:
    """Four significant digits for people, without an exponent: `14,890`, `72.54`, `0.3637`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = 3 - math.floor(math.log10(abs(value)))
    text = f"{round(value, places):,.{max(0, places)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
