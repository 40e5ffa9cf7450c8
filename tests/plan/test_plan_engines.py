"""An engine that the calibration does not know is added from its own runs, and nothing else moves."""

from pathlib import Path

import msgspec
import pytest

from headrace.plan.calibration import shipped
from headrace.plan.deployment import Inputs
from headrace.plan.fitting import with_engine
from headrace.plan.perf import perf
from headrace.plan.points import Answers, Point, read_points

OTHERS = Path(__file__).parent / "data" / "validation_points.csv"
OWN = Path(__file__).parent / "data" / "headrace_points.csv"
LOOPS = ((128, 128, 1), (4096, 64, 1), (1024, 128, 8), (512, 128, 64), (256, 64, 256))


def question(isl, osl, concurrency, **other):
    fixed = {"model": "mistral-7b", "gpu": "h200-sxm-141", "engine": "headrace", "weights": "bf16", "kv": "bf16"}
    return Inputs(**(fixed | other), isl=isl, osl=osl, concurrency=concurrency, max_num_seqs=256)


@pytest.fixture(scope="module")
def unknown():
    """The shipped calibration without what it knows of our own engine."""
    c = shipped()
    main = msgspec.structs.replace(
        c.main,
        parameters={n: v for n, v in c.main.parameters.items() if not n.startswith("engine.headrace.")},
        effects={n: v for n, v in c.main.effects.items() if "|headrace" not in n},
        runs={n: v for n, v in c.main.runs.items() if "|headrace|" not in n},
    )
    return msgspec.structs.replace(c, main=main, families=[f for f in c.families if not f.endswith("|headrace")])


def test_an_engines_runs_move_its_predictions_and_no_others(unknown):
    points = []
    for loop in LOOPS:
        before = perf(question(*loop), unknown)
        answers = Answers(ttft_ms=before.ttft_ms.value * 0.7, tpot_ms=before.tpot_ms.value * 0.6)
        points.append(
            Point(id="x", kind="perf", family="mistral", inputs=question(*loop), context=2048, answers=answers)
        )
    after = with_engine(unknown, points)
    for point in points:
        found = perf(point.inputs, after)
        assert found.ttft_ms.value == pytest.approx(point.answers.ttft_ms, rel=0.15)
        assert found.tpot_ms.value == pytest.approx(point.answers.tpot_ms, rel=0.1)
        assert found.tpot_ms.grade == "fitted"
    between = question(2048, 128, 16)
    assert perf(between, after).tpot_ms.value < 0.75 * perf(between, unknown).tpot_ms.value
    other = question(512, 128, 64, engine="vllm")
    assert perf(other, after) == perf(other, unknown)
    assert {k: after.main.parameters[k] for k in unknown.main.parameters} == unknown.main.parameters
    assert after.folds == unknown.folds
    assert after.rows == unknown.rows


def test_runs_of_a_known_engine_change_none_of_its_parameters(unknown):
    """What was fitted from many campaigns is not bent by a few more runs."""
    given = [p for p in read_points(OTHERS) if p.family == "llama" and p.kind == "perf"][:6]
    after = with_engine(unknown, given)
    assert {k: after.main.parameters[k] for k in unknown.main.parameters} == unknown.main.parameters


def test_the_shipped_calibration_holds_our_own_runs(unknown):
    """Each measured loop of ours is predicted within its interval; without them most figures were too slow."""
    points = read_points(OWN)
    assert len(points) >= 5
    for point in points:
        found = perf(point.inputs)
        assert found.tpot_ms.low <= point.answers.tpot_ms <= found.tpot_ms.high
        assert not any("never measured" in note for note in found.notes)
    assert with_engine(unknown, points).main == shipped().main
