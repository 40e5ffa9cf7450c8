"""The statistics do what they promise, shown by simulation: 3 % run-to-run noise, with and without a drifting machine."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.base.errors import InvalidInput
from headrace.bench import stats

NOISE = 0.03
TRIALS = 1000


def simulate(effect: float, pairs: int, seed: int, drift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Mean log ratio and half width of each of 1,000 trials of A B B A … with `effect` between the servers."""
    source = np.random.default_rng(seed)
    a, b = source.normal(0.0, NOISE, (2, TRIALS, pairs))
    places = np.arange(2 * pairs).reshape(pairs, 2)
    flipped = np.arange(pairs) % 2 == 1
    slope = drift / (2 * pairs - 1)
    a += slope * np.where(flipped, places[:, 1], places[:, 0])
    b += slope * np.where(flipped, places[:, 0], places[:, 1]) + np.log1p(effect)
    logs = b - a
    return logs.mean(axis=1), stats.interleaved_half_width(logs)


@pytest.mark.parametrize("pairs", [4, 6, 8, 12])
@pytest.mark.parametrize("seed", range(5))
def test_identical_servers_are_called_different_in_at_most_5_percent(pairs: int, seed: int) -> None:
    mean, half = simulate(0.0, pairs, seed)
    assert np.mean(np.abs(mean) > half) <= 0.05


@pytest.mark.parametrize("seed", range(5))
def test_a_drifting_machine_does_not_make_identical_servers_different(seed: int) -> None:
    mean, half = simulate(0.0, 8, seed, drift=0.2)
    assert np.mean(np.abs(mean) > half) <= 0.05


@pytest.mark.parametrize("effect", [0.10, -0.10])
@pytest.mark.parametrize("seed", range(5))
def test_a_true_ten_percent_is_found_with_eight_pairs(effect: float, seed: int) -> None:
    mean, half = simulate(effect, 8, seed)
    found = (mean > half) if effect > 0 else (mean < -half)
    assert np.mean(found) >= 0.95


def test_the_interval_covers_the_truth() -> None:
    mean, half = simulate(0.04, 8, 99)
    assert np.mean(np.abs(mean - np.log(1.04)) <= half) >= 0.95


def test_the_smallest_effect_is_found_about_eight_times_in_ten() -> None:
    mean, half = simulate(0.0, 8, 5)
    typical = stats.paired(np.ones(8), np.exp(simulate_logs(7)))
    assert 0.03 < typical.smallest_effect < 0.12
    mean, half = simulate(float(np.median(np.expm1(half * 1.43))), 8, 6)
    assert 0.7 <= np.mean(mean > half) <= 0.95


def simulate_logs(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, NOISE * 2**0.5, 8)


@pytest.mark.parametrize(
    ("low", "high", "higher", "margin", "expected"),
    [
        (0.97, 1.02, True, 0.05, "PASS"),
        (0.90, 0.94, True, 0.05, "FAIL"),
        (0.93, 1.02, True, 0.05, "INCONCLUSIVE"),
        (0.97, 1.04, False, 0.05, "PASS"),
        (1.07, 1.10, False, 0.05, "FAIL"),
        (1.03, 1.10, False, 0.05, "INCONCLUSIVE"),
        (1.01, 1.10, True, None, "BETTER"),
        (1.01, 1.10, False, None, "WORSE"),
        (0.99, 1.10, False, None, "INCONCLUSIVE"),
    ],
)
def test_verdicts(low: float, high: float, higher: bool, margin: float | None, expected: str) -> None:
    estimate = stats.RatioEstimate((low * high) ** 0.5, low, high, 0.1, 8, "")
    assert stats.verdict(estimate, higher_is_better=higher, margin=margin) == expected


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(InvalidInput, match="pairs"):
        stats.interleaved_half_width(np.zeros(2))
    with pytest.raises(InvalidInput, match="even"):
        stats.interleaved_half_width(np.zeros(5))


def test_single_runs_fall_back_to_an_assumed_noise_and_say_so() -> None:
    estimate = stats.unpaired(np.array([100.0]), np.array([103.0]), 0.03)
    assert estimate.low < 1 < estimate.high
    assert "assumed" in estimate.basis
    assert stats.unpaired(np.array([100.0]), np.array([120.0]), 0.03).low > 1


def test_separate_repeated_runs_keep_their_error_rate() -> None:
    source = np.random.default_rng(3)
    wrong = 0
    for _ in range(400):
        a, b = np.exp(source.normal(0, NOISE, (2, 6)))
        estimate = stats.unpaired(a, b, 0.03)
        wrong += not estimate.low <= 1 <= estimate.high
    assert wrong / 400 <= 0.07


def test_two_runs_far_apart_do_not_make_a_time_below_zero() -> None:
    found = stats.mean_interval(np.array([1.0, 3.0]))
    assert (found.value, found.low) == (2.0, 0.0)
    assert found.high == pytest.approx(2 + 12.706, abs=1e-3)
    assert stats.mean_interval(np.array([-1.0, 3.0])).low < 0


def test_block_bootstrap_draws_whole_neighbourhoods() -> None:
    counts = stats.block_counts(27, 50, seed=1)
    assert counts.shape == (50, 27)
    assert (counts.sum(axis=1) == 27).all()
    # Blocks of three: a drawn item in the middle of the run has a drawn neighbour.
    for row in counts:
        for k in np.flatnonzero(row[1:-1]) + 1:
            assert row[k - 1] or row[k + 1]


def test_bootstrap_intervals_cover_the_mean_of_correlated_requests() -> None:
    source = np.random.default_rng(11)
    covered = 0
    for _ in range(100):
        steps = source.normal(0, 1, 203)
        values = 10 + (steps[:-3] + steps[1:-2] + steps[2:-1] + steps[3:]) / 2
        found = stats.describe(stats.Samples(values, np.arange(200), 200), resamples=200)
        low, high = found["mean_interval"]
        covered += low <= 10 <= high
    assert covered >= 84


def test_quantiles_weigh_requests_not_order() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0])
    found = stats.describe(stats.Samples(values, np.array([0, 0, 1, 1]), 2))
    assert found["mean"] == 2.5
    assert found["p50"] == 2.5
    assert (found["min"], found["max"], found["count"]) == (1.0, 4.0, 4)


def test_rate_is_total_over_time() -> None:
    at_s = np.linspace(0.05, 9.95, 100)
    rate = stats.rate_interval(at_s, np.full(100, 3.0), 0.0, 10.0)
    assert rate.value == 30.0
    assert rate.low <= rate.value <= rate.high


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0.05", 0.05), ("0%", 0.0)])
def test_shares(text: str, value: float) -> None:
    assert stats.parse_share(text, "--margin") == pytest.approx(value)


@pytest.mark.parametrize("text", ["five", "100%", "-1%", ""])
def test_bad_shares_name_the_option(text: str) -> None:
    with pytest.raises(InvalidInput, match="--margin"):
        stats.parse_share(text, "--margin")
