"""Measured runs nearby: errors are carried over within a campaign, fade with distance, and never reach another one."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.plan import fitting
from headrace.plan.calibration import METRICS, shipped
from headrace.plan.costs.roofline import fastest_seconds
from headrace.plan.deployment import Inputs, resolve
from headrace.plan.neighbours import NOISE, Run, campaign_name, likeness, position, shift
from headrace.plan.perf import perf_deployment, predict
from headrace.plan.points import read_points
from headrace.plan.workload import traffic

POINTS = Path(__file__).parent / "data" / "validation_points.csv"
QUESTION = Inputs(
    model="qwen3-32b",
    gpu="h100-sxm-80",
    n_gpus=4,
    tp=4,
    engine="sglang",
    engine_version="0.5.1.post1",
    isl=2048,
    osl=256,
    concurrency=32,
)


@pytest.fixture(scope="module")
def table():
    t = fitting.table([p for p in read_points(POINTS) if p.family in ("qwen3", "gpt-oss")])
    least = fastest_seconds(t.decode, t.peaks) / t.counts["tokens_per_step"]
    return fitting.table([p for p, cannot in zip(t.points, t.observed["tpot"] < least, strict=True) if not cannot])


def test_an_error_is_shared_fully_at_its_place_and_fades():
    here, error = (0.0, 1.0), math.log(2)
    runs = [Run(here, ttft=error / (1 + NOISE))]
    assert shift(runs, here, "ttft") == pytest.approx(error / (1 + NOISE))
    near, far = shift(runs, (0.0, 2.0), "ttft"), shift(runs, (9.0, 9.0), "ttft")
    assert error > near > far > 0
    assert shift(runs, here, "tpot") == 0.0
    assert shift([], here, "ttft") == 0.0


def test_runs_are_weighted_by_kriging(table, monkeypatch):
    """Against the textbook form: the expected error given all others, solved as one system over every campaign."""
    monkeypatch.setattr(fitting, "CONTRADICTED", math.inf)  # noise of one size, as in the textbook
    everything = np.ones(len(table), dtype=bool)
    plain = msgspec.structs.replace(shipped().main, runs={})
    carried = fitting.with_runs(table, plain, everything)
    before, after = fitting.predict(table, plain), fitting.predict(table, carried)
    same = np.array([[a == b for b in table.campaigns] for a in table.campaigns])
    alike = np.array([[likeness(a, b) for b in table.positions] for a in table.positions]) * same
    for m in METRICS:
        error = np.log(table.observed[m] / before[m])
        seen = np.isfinite(error)
        within = alike[np.ix_(seen, seen)]
        expected = within @ np.linalg.solve(within + NOISE * np.eye(len(within)), np.clip(error[seen], -2, 2))
        assert np.allclose(np.log(after[m] / before[m])[seen], expected, atol=2e-3)
        assert np.abs(np.log(table.observed[m] / after[m])[seen]).mean() < np.abs(error[seen]).mean()


def test_a_run_that_its_neighbours_contradict_counts_less():
    at = [(float(i), 0.0) for i in range(6)]
    errors = np.array([0.1, 0.1, -2.0, 0.1, 0.1, 0.1])

    def expected(errors, where):
        found = fitting.kriging_weights(at, errors)
        return sum(w * likeness(p, where) for w, p in zip(found, at, strict=True))

    calm = expected(np.full(6, 0.1), (2.5, 0.0))
    assert calm == pytest.approx(0.1, abs=0.02)
    plain = np.linalg.solve([[likeness(a, b) + NOISE * (a == b) for b in at] for a in at], errors)
    pulled = sum(w * likeness(p, (2.5, 0.0)) for w, p in zip(plain, at, strict=True))
    assert abs(expected(errors, (2.5, 0.0)) - calm) < 0.5 * abs(pulled - calm)
    # Runs that agree are believed, however far they are from the fit.
    assert expected(np.full(6, -1.5), (2.5, 0.0)) == pytest.approx(-1.5, abs=0.15)
    # One run alone: the further it is off, the smaller the part of it that is carried over.
    small, large = (fitting.kriging_weights(at[:1], np.array([e]))[0] / e for e in (0.1, 1.8))
    assert large < 0.8 * small


def test_a_small_model_says_less_about_a_large_one_of_its_family():
    def place(model):
        return position(resolve(msgspec.structs.replace(QUESTION, model=model)), 32, 2048, 256)

    assert likeness(place("qwen3-8b"), place("qwen3-32b")) < likeness(place("qwen3-14b"), place("qwen3-32b")) < 1.0
    assert place("qwen3-32b") == place("Qwen/Qwen3-32B-FP8")


def test_runs_left_out_are_not_used(table):
    mask = np.arange(len(table)) % 2 == 0
    used = fitting.with_runs(table, msgspec.structs.replace(shipped().main, runs={}), mask)
    assert sum(map(len, used.runs.values())) == mask.sum()
    positions = {run.position for runs in used.runs.values() for run in runs}
    assert positions == {tuple(round(x, 4) for x in table.positions[i]) for i in np.flatnonzero(mask)}


def test_predictions_use_the_runs_of_their_campaign_and_say_so():
    d = resolve(QUESTION)
    c, t = shipped().main, traffic(d)
    runs = c.runs[campaign_name("qwen3", d)]
    at = position(d, t.running + t.waiting, 2048, 256)
    with_them = predict(d, c, shipped().seen, "fitted")
    without = predict(d, msgspec.structs.replace(c, runs={}), shipped().seen, "fitted")
    assert with_them.ttft_ms.value == pytest.approx(without.ttft_ms.value * math.exp(shift(runs, at, "ttft")))
    assert with_them.tpot_ms.value == pytest.approx(without.tpot_ms.value * math.exp(shift(runs, at, "tpot")))
    assert any(f"{len(runs)} runs of this model" in note for note in with_them.notes)
    assert not any("runs of this model" in note for note in without.notes)
    other = predict(resolve(msgspec.structs.replace(QUESTION, weights="fp8")), c, shipped().seen, "fitted")
    assert not any("runs of this model" in note for note in other.notes)


def test_intervals_follow_what_was_measured():
    """A load of a measured cell, another tensor-parallel size, a card without runs of the family."""
    c = shipped()

    def width(**changes):
        found = perf_deployment(resolve(msgspec.structs.replace(QUESTION, **changes)))
        return found.tpot_ms.high / found.tpot_ms.low

    def band(tier):
        return tier.tpot.high / tier.tpot.low

    assert width() == pytest.approx(band(c.near), rel=1e-3)
    assert width(n_gpus=1, tp=1, weights="fp8") == pytest.approx(band(c.seen), rel=1e-3)
    assert width(gpu="b300-sxm-288") == pytest.approx(band(c.unseen), rel=1e-3)
    assert band(c.near) < band(c.seen) < band(c.unseen)


def test_loads_of_a_cell_are_left_out_in_turn(table):
    cells = [f"{c}|{p[3]:.3f}" for c, p in zip(table.campaigns, table.positions, strict=True)]
    place, alone = fitting._places(cells, table)
    for cell in set(cells):
        rows = [i for i, c in enumerate(cells) if c == cell]
        assert sorted(place[i] for i in rows) == list(range(len(rows)))
        assert all(alone[i] == (len(rows) == 1) for i in rows)
