"""Arrival processes: the rate and the burstiness asked for, from the seed alone; wrong combinations are refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import numpy as np
import pytest

from headrace.base.errors import InvalidInput
from headrace.bench.arrivals import ArrivalOptions, Closed, Trace
from headrace.bench.traffic import Call, Session, Stage


def sessions(calls: int = 1, arrivals: bool = False) -> Iterator[Session]:
    def script():  # type: ignore[no-untyped-def]
        yield Stage((Call("x", 1, 1),) * calls)

    return (Session(k, calls, script, k * 0.5 if arrivals else None) for k in count())


def starts(options: ArrivalOptions, n: int, seed: int = 0, calls: int = 1, arrivals: bool = False) -> np.ndarray:
    process = options.resolve(has_arrivals=arrivals, seed=seed)
    return np.array([at for _, at in islice(process.starts(sessions(calls, arrivals)), n)], dtype=float)


@pytest.mark.parametrize(
    ("options", "variation"),
    [
        (ArrivalOptions(rate="20", kind="constant"), 0.0),
        (ArrivalOptions(rate="20"), 1.0),
        (ArrivalOptions(rate="20", kind="gamma", burstiness=0.25), 2.0),
        (ArrivalOptions(rate="20", kind="gamma", burstiness=4.0), 0.5),
    ],
)
def test_rate_and_variation(options: ArrivalOptions, variation: float) -> None:
    gaps = np.diff(starts(options, 20_000))
    assert gaps.mean() == pytest.approx(0.05, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.08)
    assert starts(options, 1)[0] == 0.0


def test_seeds() -> None:
    poisson = ArrivalOptions(rate="5")
    assert (starts(poisson, 50, seed=1) == starts(poisson, 50, seed=1)).all()
    assert (starts(poisson, 50, seed=1) != starts(poisson, 50, seed=2)).any()


def test_the_rate_counts_requests_not_sessions() -> None:
    at = starts(ArrivalOptions(rate="20"), 5_000, calls=4)
    assert np.diff(at).mean() == pytest.approx(0.2, rel=0.05)


def test_a_ramp_grows_linearly_and_then_stays() -> None:
    at = starts(ArrivalOptions(rate="10:50", over_s=100.0), 6_000)
    assert ((at >= 0) & (at < 50)).sum() == pytest.approx(1_000, rel=0.1)
    assert ((at >= 50) & (at < 100)).sum() == pytest.approx(2_000, rel=0.1)
    assert ((at >= 100) & (at < 140)).sum() == pytest.approx(2_000, rel=0.1)
    assert (np.diff(at) >= 0).all()


def test_a_trace_is_stretched() -> None:
    assert starts(ArrivalOptions(time_scale=0.5), 4, arrivals=True).tolist() == [0.0, 0.25, 0.5, 0.75]


def test_defaults() -> None:
    assert isinstance(ArrivalOptions().resolve(has_arrivals=True, seed=0), Trace)
    assert ArrivalOptions().resolve(has_arrivals=False, seed=0) == Closed(1)
    assert ArrivalOptions(concurrency=8).resolve(has_arrivals=True, seed=0) == Closed(8)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (ArrivalOptions(concurrency=2, rate="3"), "--concurrency"),
        (ArrivalOptions(concurrency=0), "--concurrency"),
        (ArrivalOptions(rate="-3"), "--rate"),
        (ArrivalOptions(rate="fast"), "--rate"),
        (ArrivalOptions(rate="nan"), "--rate"),
        (ArrivalOptions(kind="poisson"), "--rate"),
        (ArrivalOptions(rate="1:2"), "--rate"),
        (ArrivalOptions(rate="1:2", kind="ramp", over_s=-1.0), "--duration"),
        (ArrivalOptions(rate="1", kind="whenever"), "--arrivals"),
        (ArrivalOptions(kind="trace"), "--arrivals"),
        (ArrivalOptions(rate="1", kind="closed"), "--rate"),
        (ArrivalOptions(concurrency=1, kind="poisson"), "--concurrency"),
        (ArrivalOptions(rate="1", burstiness=2.0), "--burstiness"),
        (ArrivalOptions(rate="1", kind="gamma", burstiness=-1.0), "--burstiness"),
        (ArrivalOptions(rate="1", kind="gamma", burstiness=0.0), "--burstiness"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: ArrivalOptions, field: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        options.resolve(has_arrivals=False, seed=0)
    assert raised.value.field == field
