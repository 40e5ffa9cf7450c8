"""What is measured, one file per metric. A metric exports `METRIC`; each is tested exact on the golden server.

Time to first token and end-to-end time count from the *intended* send time; a late send is the client's or the queue's
fault, never the reader's gain. Gaps count per token: a chunk of n tokens after a gap g is n gaps of g/n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.base.registry import Registry
from headrace.bench.records import RequestRecord
from headrace.bench.stats import Interval, Samples, describe
from headrace.bench.view import RunView

METRICS = Registry("headrace.bench.metrics", "METRIC", kind="metric")
Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True, slots=True)
class Metric:
    """`key` in the summary; `of` gives samples, an interval, a number, a table, or None where it cannot be known."""

    key: str
    what: str
    unit: str
    better: Better
    of: Callable[[RunView], Samples | Interval | float | dict[str, Any] | None]


def measure(view: RunView) -> dict[str, Any]:
    """Every registered metric of a run, by summary key; None where the run cannot tell."""
    return {metric.key: as_json(metric.of(view)) for metric in all_metrics()}


def all_metrics() -> Iterator[Metric]:
    """Every registered metric, in order of its name."""
    for _, metric in METRICS:
        yield metric


def as_json(found: Samples | Interval | float | dict[str, Any] | None) -> Any:
    """A metric's result as the summary holds it."""
    match found:
        case Samples():
            return describe(found) if len(found.values) else None
        case Interval():
            return {"value": found.value, "low": found.low, "high": found.high}
    return found


def request_ttft_s(record: RequestRecord) -> float:
    """From the intended send time to the first event with text."""
    return record.event_s[0] - record.intended_s


def request_e2e_s(record: RequestRecord) -> float:
    """From the intended send time to the last event with text."""
    return record.event_s[-1] - record.intended_s


def request_itl_s(record: RequestRecord) -> npt.NDArray[np.float64]:
    """One gap per token after the first event: a chunk of n tokens after a gap g counts as n gaps of g/n.

    Where the tokens of a chunk are estimated (not whole), they are rounded to at least one. An event that carries no
    new token belongs to the gap of the next one.
    """
    tokens = np.array(record.event_tokens)
    kept = tokens > 0
    kept[:1] = True
    gaps = np.diff(np.array(record.event_s)[kept])
    repeats = np.maximum(1, np.rint(tokens[kept][1:])).astype(int)
    return np.repeat(gaps / repeats, repeats)


def request_tpot_s(record: RequestRecord) -> float | None:
    """Seconds per token after the first event, over the tokens that came after it; None where there are none."""
    after = sum(record.event_tokens[1:])
    return (record.event_s[-1] - record.event_s[0]) / after if after > 0 else None


def per_request(view: RunView, value: Callable[[RequestRecord], float | None]) -> Samples:
    """One value for each complete answer, those that are None left out."""
    found = [(value(record), place) for place, record in enumerate(view.ok)]
    kept = [(v, place) for v, place in found if v is not None]
    return Samples(np.array([v for v, _ in kept], dtype=float), np.array([p for _, p in kept], dtype=int), len(view.ok))


def per_token(view: RunView, values: Callable[[RequestRecord], npt.NDArray[np.float64]]) -> Samples:
    """Many values for each complete answer."""
    found = [values(record) for record in view.ok]
    if not found:
        return Samples(np.array([]), np.array([], dtype=int), 0)
    groups = np.repeat(np.arange(len(found)), [len(v) for v in found])
    return Samples(np.concatenate(found), groups, len(found))
