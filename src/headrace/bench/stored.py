"""Summaries of finished runs as files hold them: what is read of one is checked first, for people edit and cut them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace.base.errors import InvalidInput
from headrace.bench.records import SUMMARY_FILE, read_json

_Number = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
_Pair = tuple[_Number, _Number]


class _Times(msgspec.Struct):
    """Results that were taken over need not have all of them."""

    mean: _Number | msgspec.UnsetType = msgspec.UNSET
    p50: _Number | msgspec.UnsetType = msgspec.UNSET
    p90: _Number | msgspec.UnsetType = msgspec.UNSET
    p99: _Number | msgspec.UnsetType = msgspec.UNSET
    count: int = 0
    mean_interval: _Pair | msgspec.UnsetType = msgspec.UNSET
    p50_interval: _Pair | msgspec.UnsetType = msgspec.UNSET
    p90_interval: _Pair | msgspec.UnsetType = msgspec.UNSET
    p99_interval: _Pair | msgspec.UnsetType = msgspec.UNSET


class _Rate(msgspec.Struct):
    value: _Number
    low: _Number
    high: _Number


class _Requests(msgspec.Struct):
    sent: int
    ok: int
    failed: int
    by_outcome: dict[str, int]
    unsent: int
    too_long_skipped: int
    too_long_clipped: int


class _Failure(msgspec.Struct):
    index: int
    outcome: str
    http_status: int
    error: str


class _Slo(msgspec.Struct):
    objective: str
    kept: bool
    misses: list[str]


class _PlanFigure(msgspec.Struct):
    name: str
    planned: _Number
    low: _Number
    high: _Number
    grade: str
    measured: _Number
    ratio: _Number
    within: bool


class _Plan(msgspec.Struct):
    subject: str
    figures: list[_PlanFigure]


class _Tokens(msgspec.Struct):
    cached_undeclared: _Number | None = None


class _Settings(msgspec.Struct):
    target: dict[str, Any] = {}


class _Summary(msgspec.Struct):
    """What reports and comparisons read without looking; the rest of a summary is free."""

    schema: str
    created: str
    model: str
    workload: str
    valid: bool
    invalid_because: list[str]
    notes: list[str]
    requests: _Requests
    failures: list[_Failure]
    duration_s: _Number
    arrival_span_s: _Number | None = None
    engine: str | None = None
    settings: _Settings | None = None
    host: dict[str, str] = {}
    foreign_cores: _Number | None = None
    headroom: dict[str, Any] | None = None
    tokens: _Tokens | None = None
    slo: _Slo | None = None
    plan: _Plan | None = None


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run's folder. `InvalidInput` where there is none, or one that does not say what summaries say."""
    from headrace.bench.metrics import all_metrics  # loads scipy, which `headrace bench --help` does not wait for

    path = folder / SUMMARY_FILE
    try:
        found = read_json(path, dict[str, Any])
    except FileNotFoundError:
        raise InvalidInput(f"{folder} holds no finished run", field="DIR") from None
    at = ""
    try:
        msgspec.convert(found, _Summary)
        for metric in all_metrics():
            at = f" of {metric.key}"
            value = found.get(metric.key)
            table = value if isinstance(value, dict) else {}
            kind: Any = _Times if "p99" in table else _Rate if "value" in table else dict[str, Any] | None
            msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{path} is damaged: {error}{at}", field="DIR") from None
    return found
