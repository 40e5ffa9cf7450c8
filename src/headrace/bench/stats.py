"""What a measurement allows to say: intervals within a run, and comparisons between runs.

Within a run, requests that follow each other share queues and batches, so they are resampled in moving blocks
(Künsch 1989), of about n^(1/3) neighbours. Between runs, what counts is how whole runs vary: runs are compared as
logarithms, in pairs when they were interleaved A B B A, with Student's t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import stats as scipy_stats

from headrace.base.bootstrap import CONFIDENCE, Array, block_counts
from headrace.base.bootstrap import Interval as Interval
from headrace.base.errors import InvalidInput

QUANTILES: dict[str, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
POWER = 0.8
MIN_PAIRS = 4


@dataclass(frozen=True, slots=True)
class Samples:
    """Values with the number of the request that each belongs to (0, 1, … in order of sending)."""

    values: Array
    groups: npt.NDArray[np.int64]
    num_groups: int


def describe(samples: Samples, resamples: int = 400) -> dict[str, float | int | list[float]]:
    """Mean, quantiles, extremes and count, each figure of `mean, p50, p90, p99` with its interval as `NAME_interval`."""
    order = np.argsort(samples.values, kind="stable")
    values, groups = samples.values[order], samples.groups[order]
    found: dict[str, float | int | list[float]] = {"mean": float(values.mean())}
    found |= {name: float(np.quantile(values, q)) for name, q in QUANTILES.items()}
    found |= {"min": float(values[0]), "max": float(values[-1]), "count": len(values)}
    if samples.num_groups < 2:
        return found
    if len(values) > 200_000:
        resamples = 100
    drawn: dict[str, list[float]] = {name: [] for name in ("mean", *QUANTILES)}
    for counts in block_counts(samples.num_groups, resamples):
        weights = counts[groups]
        whole = np.cumsum(weights)
        if whole[-1] == 0:
            continue
        drawn["mean"].append(float(weights @ values / whole[-1]))
        places = np.searchsorted(whole, np.array(list(QUANTILES.values())) * whole[-1])
        for name, place in zip(QUANTILES, places, strict=True):
            drawn[name].append(float(values[min(int(place), len(values) - 1)]))
    for name, results in drawn.items():
        low, high = np.quantile(results, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        found[f"{name}_interval"] = [float(low), float(high)]
    return found


def rate_interval(at_s: Array, amounts: Array, start_s: float, end_s: float, resamples: int = 1000) -> Interval:
    """Total of `amounts` per second of [start, end], with a moving-block bootstrap over equal slices of the time."""
    duration_s = end_s - start_s
    if duration_s <= 0 or not len(at_s):
        return Interval(0.0, 0.0, 0.0)
    slices = int(np.clip(len(at_s) // 4, 8, 200))
    edges = np.clip(((at_s - start_s) / duration_s * slices).astype(int), 0, slices - 1)
    per_slice = np.bincount(edges, weights=amounts, minlength=slices) * (slices / duration_s)
    means = block_counts(slices, resamples) @ per_slice / slices
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(amounts.sum() / duration_s), float(low), float(high))


def mean_interval(values: Array) -> Interval:
    """Mean of a few independent values (one per run) with Student's t; of times and rates no end lies below 0."""
    mean = float(values.mean())
    if len(values) < 2:
        return Interval(mean, float("nan"), float("nan"))
    half = float(scipy_stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    low = mean - half
    return Interval(mean, max(low, 0.0) if values.min() >= 0 else low, mean + half)


@dataclass(frozen=True, slots=True)
class RatioEstimate:
    """B over A, with the 95 % interval, and the smallest true change that such an experiment finds 8 times in 10."""

    ratio: float
    low: float
    high: float
    smallest_effect: float
    pairs: int
    basis: str


def _t_half(values: Array) -> Array:
    n = values.shape[-1]
    quantile = scipy_stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)
    return np.asarray(quantile * values.std(axis=-1, ddof=1) / np.sqrt(n))


def check_pairs(pairs: int) -> None:
    """Raise InvalidInput unless so many interleaved pairs have an interval."""
    if pairs < MIN_PAIRS or pairs % 2:
        raise InvalidInput(f"needs an even number of pairs, at least {MIN_PAIRS}, got {pairs}", field="--pairs")


def interleaved_half_width(log_ratios: Array) -> Array:
    """Half width of the interval of the mean log ratio; [..., pairs] → [...], pairs even and at least 4.

    Pairs come in couples (A B, B A). One interval takes each pair as an observation; the other takes each couple,
    within which a linear drift of the machine cancels. The wider of the two is used: the first is not valid under
    drift, the second is but has few degrees of freedom, and their maximum errs to the safe side of 5 %.
    """
    pairs = log_ratios.shape[-1]
    check_pairs(pairs)
    couples = log_ratios.reshape(*log_ratios.shape[:-1], pairs // 2, 2).mean(axis=-1)
    return np.maximum(_t_half(log_ratios), _t_half(couples))


def paired(a: Array, b: Array) -> RatioEstimate:
    """B over A from interleaved runs, pair k being (a[k], b[k]) in the order A B, B A, A B, …"""
    log_ratios = np.log(b) - np.log(a)
    return _estimate(float(log_ratios.mean()), float(interleaved_half_width(log_ratios)), len(a), "interleaved runs")


def unpaired(a: Array, b: Array, assumed_noise: float, within: float = 0.0) -> RatioEstimate:
    """B over A from runs that were not interleaved.

    With at least two runs on each side Welch's t on the logarithms; otherwise nothing is known about how runs vary,
    and `assumed_noise` (relative standard deviation between runs) stands in for it, which `basis` says; `within` is the
    half width, on the log scale, that the bootstrap within the runs leaves, and is added to it in quadrature.
    """
    log_a, log_b = np.log(a), np.log(b)
    centre = float(log_b.mean() - log_a.mean())
    if min(len(a), len(b)) >= 2:
        va, vb = log_a.var(ddof=1) / len(a), log_b.var(ddof=1) / len(b)
        spread = max(float(va + vb), 1e-18)
        freedom = spread**2 / max(va**2 / (len(a) - 1) + vb**2 / (len(b) - 1), 1e-36)
        half = float(scipy_stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * np.sqrt(spread))
        return _estimate(centre, half, min(len(a), len(b)), "separate runs, Welch")
    half = float(scipy_stats.norm.ppf((1 + CONFIDENCE) / 2)) * assumed_noise * float(np.sqrt(1 / len(a) + 1 / len(b)))
    return _estimate(
        centre,
        float(np.hypot(half, within)),
        min(len(a), len(b)),
        f"one run each, {assumed_noise:.1%} run-to-run noise assumed",
    )


def _estimate(centre: float, half: float, pairs: int, basis: str) -> RatioEstimate:
    seen = half * (1 + float(scipy_stats.norm.ppf(POWER) / scipy_stats.norm.ppf((1 + CONFIDENCE) / 2)))
    return RatioEstimate(
        float(np.exp(centre)),
        float(np.exp(centre - half)),
        float(np.exp(centre + half)),
        float(np.expm1(seen)),
        pairs,
        basis,
    )


Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE", "BETTER", "WORSE"]


def verdict(estimate: RatioEstimate, *, higher_is_better: bool, margin: float | None) -> Verdict:
    """Judge B against A.

    With a margin: PASS when the whole interval is better than −margin, FAIL when the whole interval is worse than it,
    else INCONCLUSIVE. Without: BETTER or WORSE when the interval leaves out 1, else INCONCLUSIVE.
    A margin of 5 % means a throughput ratio of 0.95 or a latency ratio of 1/0.95.
    """
    low, high = estimate.low, estimate.high
    if not higher_is_better:
        low, high = 1 / high, 1 / low
    bar = 1.0 if margin is None else 1.0 - margin
    if low > bar:
        return "BETTER" if margin is None else "PASS"
    if high < bar:
        return "WORSE" if margin is None else "FAIL"
    return "INCONCLUSIVE"


def parse_share(text: str, field: str) -> float:
    """`5%` or `0.05` as 0.05; must lie from 0 to below 1."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise InvalidInput(f"expected a share such as 5%, got {text!r}", field=field) from None
    if not 0 <= value < 1:
        raise InvalidInput(f"must be from 0 to below 100 %, got {text!r}", field=field)
    return value
