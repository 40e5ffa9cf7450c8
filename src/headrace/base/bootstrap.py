"""Intervals by the moving-block bootstrap, for ordered items whose neighbours are not independent (Künsch 1989)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


def block_counts(n: int, resamples: int, seed: int = 0) -> Array:
    """How often each of `n` ordered items is drawn, in blocks of about n^(1/3) neighbours; [resamples, n], each row sums
    to n."""
    source = np.random.default_rng(seed)
    block = max(1, min(n, round(n ** (1 / 3))))
    blocks = -(-n // block)
    starts = source.integers(0, n - block + 1, size=(resamples, blocks))
    drawn = (starts[:, :, None] + np.arange(block)).reshape(resamples, -1)[:, :n]
    rows = np.arange(resamples)[:, None] * n
    return np.bincount((rows + drawn).ravel(), minlength=resamples * n).reshape(resamples, n).astype(np.float64)


def ratio_interval(sums: Array, counts: Array, resamples: int = 2000) -> Interval:
    """Σ `sums` / Σ `counts` over ordered items (windows, prompts), each resampled whole; [items] each.

    With one item nothing is known about how items vary: low and high are NaN.
    """
    value = float(sums.sum() / counts.sum())
    if len(sums) < 2:
        return Interval(value, float("nan"), float("nan"))
    drawn = block_counts(len(sums), resamples)
    low, high = np.quantile((drawn @ sums) / (drawn @ counts), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high))


def share_interval(hits: Array, trials: Array, resamples: int = 2000) -> Interval:
    """`ratio_interval` of a share, Σ `hits` / Σ `trials`. Where every trial had the same outcome, resampling finds nothing else and would
    give no width at all: then Wilson's score interval of as many independent trials (Wilson 1927), closed at 0 or 1.
    """
    found = ratio_interval(hits, trials, resamples)
    if 0.0 < found.value < 1.0:
        return found
    n = float(trials.sum())
    square = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) ** 2
    reach = square / (n + square)
    return Interval(found.value, max(0.0, found.value - reach), min(1.0, found.value + reach))
