"""One finished run as its metrics see it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.bench.records import Outcome, RequestRecord, ServerSample
from headrace.bench.slo import Slo


@dataclass(frozen=True, slots=True)
class Price:
    """What the machine costs while it serves."""

    usd_per_hour: float


@dataclass(frozen=True, slots=True)
class RunView:
    """Records of a run in order of sending, its server samples, and what a user wants computed from them.

    The clock of a resumed run goes on where it stopped, so times need no correction.
    """

    records: tuple[RequestRecord, ...]
    samples: tuple[ServerSample, ...] = ()
    slo: Slo | None = None
    price: Price | None = None

    @property
    def ok(self) -> list[RequestRecord]:
        """Complete answers; nothing else enters an average."""
        return [record for record in self.records if record.outcome is Outcome.OK]

    @property
    def span_s(self) -> tuple[float, float]:
        """From the first intended time to the last end of any request."""
        if not self.records:
            return 0.0, 0.0
        return min(r.intended_s for r in self.records), max(r.end_s for r in self.records)

    @property
    def duration_s(self) -> float:
        start_s, end_s = self.span_s
        return end_s - start_s
