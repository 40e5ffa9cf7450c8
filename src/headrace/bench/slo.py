"""Service level objectives: `ttft_p99<500ms,itl_p99<50ms`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.base.errors import InvalidInput
from headrace.bench.records import RequestRecord

_TERM = re.compile(r"^(ttft|itl|tpot|e2e)(?:_(mean|p50|p90|p99))?\s*<=?\s*([0-9.]+)\s*(ms|s)$")


@dataclass(frozen=True, slots=True)
class Objective:
    """One term: `metric` (ttft, itl, tpot, e2e), the statistic it is about, and its limit in seconds."""

    metric: str
    statistic: str
    limit_s: float

    def __str__(self) -> str:
        return f"{self.metric}_{self.statistic}<{self.limit_s * 1e3:g}ms"


@dataclass(frozen=True, slots=True)
class Slo:
    """Terms that must all hold."""

    objectives: tuple[Objective, ...]

    @classmethod
    def parse(cls, text: str) -> Slo:
        found = []
        for term in filter(None, (part.strip() for part in text.split(","))):
            match = _TERM.match(term)
            if match is None:
                raise InvalidInput(
                    f"cannot read {term!r}",
                    field="--slo",
                    remedy="terms such as ttft_p99<500ms, itl_p99<50ms, e2e_p90<2s",
                )
            metric, statistic, number, unit = match.groups()
            found.append(Objective(metric, statistic or "p99", float(number) * (1e-3 if unit == "ms" else 1.0)))
        if not found:
            raise InvalidInput("is empty", field="--slo")
        return cls(tuple(found))

    def misses(self, summary: Mapping[str, Any]) -> list[str]:
        """What a summary does not keep, one line each; empty when the objective holds."""
        missed = []
        for objective in self.objectives:
            figures = summary.get(f"{objective.metric}_s")
            value = figures[objective.statistic] if figures else None
            if value is None or value >= objective.limit_s:
                said = "was not measured" if value is None else f"was {value * 1e3:.4g} ms"
                missed.append(f"{objective}: {said}")
        return missed

    def kept_by(self, record: RequestRecord) -> bool:
        """Whether this one request keeps every term: its own TTFT and E2E, and the statistic over its own gaps."""
        return all(_own(record, o) < o.limit_s for o in self.objectives)

    def __str__(self) -> str:
        return ",".join(map(str, self.objectives))


def _own(record: RequestRecord, objective: Objective) -> float:
    from headrace.bench.metrics import request_e2e_s, request_itl_s, request_tpot_s, request_ttft_s

    match objective.metric:
        case "ttft":
            return request_ttft_s(record)
        case "e2e":
            return request_e2e_s(record)
        case "tpot":
            return request_tpot_s(record) or 0.0
    gaps = request_itl_s(record)
    if not len(gaps):
        return 0.0
    if objective.statistic == "mean":
        return float(gaps.mean())
    return float(np.quantile(gaps, {"p50": 0.5, "p90": 0.9, "p99": 0.99}[objective.statistic]))
