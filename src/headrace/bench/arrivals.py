"""When requests are wanted: closed loop, constant, Poisson, gamma, ramp, or a trace's own times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

from headrace.base.errors import InvalidInput
from headrace.bench.traffic import Session

ArrivalKind = Literal["closed", "constant", "poisson", "gamma", "ramp", "trace"]


class Arrivals(Protocol):
    """Start times of sessions in seconds since the run's start, or None where a free slot decides (closed loop)."""

    def starts(self, sessions: Iterator[Session]) -> Iterator[tuple[Session, float | None]]: ...


@dataclass(frozen=True, slots=True)
class Closed:
    """`concurrency` sessions at any moment; the next one starts when one ends."""

    concurrency: int

    def starts(self, sessions: Iterator[Session]) -> Iterator[tuple[Session, float | None]]:
        for session in sessions:
            yield session, None


@dataclass(frozen=True, slots=True)
class Renewal:
    """Independent gaps with a mean of 1/`rate_rps` requests. `burstiness` is the gamma shape: 1 is Poisson, below 1
    comes in bursts, above 1 is more even, None is constant. A session of k calls takes the place of k requests."""

    rate_rps: float
    burstiness: float | None
    seed: int

    def starts(self, sessions: Iterator[Session]) -> Iterator[tuple[Session, float | None]]:
        source, at_s = Random(f"arrivals/{self.seed}"), 0.0
        for session in sessions:
            yield session, at_s
            for _ in range(session.num_calls):
                at_s += self._gap(source)

    def _gap(self, source: Random) -> float:
        if self.burstiness is None:
            return 1.0 / self.rate_rps
        return source.gammavariate(self.burstiness, 1.0 / (self.burstiness * self.rate_rps))


@dataclass(frozen=True, slots=True)
class Ramp:
    """Poisson arrivals whose rate goes straight from `start_rps` to `end_rps` within `over_s`, then stays there."""

    start_rps: float
    end_rps: float
    over_s: float
    seed: int

    def starts(self, sessions: Iterator[Session]) -> Iterator[tuple[Session, float | None]]:
        source, expected = Random(f"arrivals/{self.seed}"), 0.0
        for session in sessions:
            yield session, self._when(expected)
            for _ in range(session.num_calls):
                expected += source.expovariate(1.0)

    def _when(self, expected: float) -> float:
        """The time by which `expected` requests are due: the inverse of the integrated rate."""
        slope = (self.end_rps - self.start_rps) / self.over_s
        within = (self.start_rps + self.end_rps) / 2 * self.over_s
        if expected >= within:
            return self.over_s + (expected - within) / self.end_rps
        if abs(slope) < 1e-12:
            return expected / self.start_rps
        return float((-self.start_rps + (self.start_rps**2 + 2 * slope * expected) ** 0.5) / slope)


@dataclass(frozen=True, slots=True)
class Trace:
    """The workload's own arrival times, multiplied by `time_scale` (0.5 is twice as fast)."""

    time_scale: float

    def starts(self, sessions: Iterator[Session]) -> Iterator[tuple[Session, float | None]]:
        for session in sessions:
            if session.arrival_s is None:
                raise InvalidInput(
                    f"session {session.index} has no arrival time", field="--arrivals", remedy="give --rate"
                )
            yield session, session.arrival_s * self.time_scale


@dataclass(frozen=True, slots=True)
class ArrivalOptions:
    """The options a user gives; `resolve` turns them into arrivals or says which option is wrong."""

    concurrency: int | None = None
    rate: str | None = None
    kind: str | None = None
    burstiness: float | None = None
    time_scale: float = 1.0
    over_s: float | None = None

    def resolve(self, *, has_arrivals: bool, seed: int) -> Arrivals:
        if self.concurrency is not None and self.rate is not None:
            raise InvalidInput("is given together with --rate", field="--concurrency", remedy="give one of the two")
        kind = self.kind or self._default(has_arrivals)
        if self.burstiness is not None and kind != "gamma":
            raise InvalidInput(
                f"has no meaning for {kind} arrivals", field="--burstiness", remedy="use --arrivals gamma"
            )
        if kind == "closed":
            if self.rate is not None:
                raise InvalidInput("has no meaning for closed arrivals", field="--rate", remedy="give --concurrency")
            return Closed(_positive_int(self.concurrency if self.concurrency is not None else 1, "--concurrency"))
        if self.concurrency is not None:
            raise InvalidInput(f"has no meaning for {kind} arrivals", field="--concurrency", remedy="give --rate")
        if kind == "trace":
            if not has_arrivals:
                raise InvalidInput("this workload has no arrival times of its own", field="--arrivals")
            if self.rate is not None:
                raise InvalidInput("has no meaning for trace arrivals", field="--rate", remedy="give --time-scale")
            return Trace(_positive(self.time_scale, "--time-scale"))
        if self.rate is None:
            raise InvalidInput(f"is needed for {kind} arrivals", field="--rate", remedy="requests per second")
        if kind == "ramp":
            low, _, high = self.rate.partition(":")
            if not high or self.over_s is None:
                raise InvalidInput("a ramp needs --rate START:END and --duration", field="--rate")
            return Ramp(_number(low, "--rate"), _number(high, "--rate"), _positive(self.over_s, "--duration"), seed)
        rate = _number(self.rate, "--rate")
        match kind:
            case "constant":
                return Renewal(rate, None, seed)
            case "poisson":
                return Renewal(rate, 1.0, seed)
            case "gamma":
                shape = 0.5 if self.burstiness is None else _positive(self.burstiness, "--burstiness")
                return Renewal(rate, shape, seed)
        raise InvalidInput(
            f"unknown {kind!r}", field="--arrivals", remedy="closed, constant, poisson, gamma, ramp or trace"
        )

    def _default(self, has_arrivals: bool) -> str:
        if self.rate is not None:
            return "ramp" if ":" in self.rate else "poisson"
        if self.concurrency is not None:
            return "closed"
        return "trace" if has_arrivals else "closed"


def _number(text: str, field: str) -> float:
    try:
        return _positive(float(text), field)
    except ValueError:
        raise InvalidInput(f"expected a number, got {text!r}", field=field) from None


def _positive(value: float, field: str) -> float:
    if not 0 < value < float("inf"):
        raise InvalidInput(f"must be above 0, got {value}", field=field)
    return value


def _positive_int(value: int, field: str) -> int:
    if value < 1:
        raise InvalidInput(f"must be at least 1, got {value}", field=field)
    return value
