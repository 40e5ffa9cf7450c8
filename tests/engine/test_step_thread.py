"""When the end of a step is told: once the next one's arithmetic has begun, or at once if there is nothing to wait for."""

from __future__ import annotations

import threading

import pytest

from headrace.control.request import Sampling
from headrace.control.step import SlotInit, StepPlan, StepResult
from headrace.engine.step_thread import ThreadExecutor

WAIT_S = 20.0


class Script:
    """Steps that wait for the test before they begin and before they end."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.begin = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.end = threading.Semaphore(0)
        self.failing: set[int] = set()

    def step(self, plan: StepPlan, begun) -> StepResult:
        self.entered.release()
        assert self.begin.acquire(timeout=WAIT_S)
        if plan.step_id in self.failing:
            raise RuntimeError("as told")
        begun()
        self.begun.release()
        assert self.end.acquire(timeout=WAIT_S)
        return StepResult(plan.step_id, ())


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def executor(script):
    made = ThreadExecutor(script.step, 4, name="test-steps")
    yield made
    for gate in (script.begin, script.end):
        gate.release(10)
    made.close()


def until_ended(script: Script) -> None:
    """Let the step that has begun end."""
    assert script.begun.acquire(timeout=WAIT_S)
    script.end.release()


def test_an_end_is_told_when_the_next_step_has_begun(script, executor):
    first, second = executor.submit(StepPlan(0)), executor.submit(StepPlan(1))
    assert script.entered.acquire(timeout=WAIT_S)
    script.begin.release()
    until_ended(script)
    assert script.entered.acquire(timeout=WAIT_S)  # the second is on its way
    assert not first.done()
    script.begin.release()
    assert script.begun.acquire(timeout=WAIT_S)
    assert first.done()
    assert first.result().step_id == 0
    assert not second.done()


def test_the_last_end_is_told_at_once(script, executor):
    only = executor.submit(StepPlan(0))
    script.begin.release()
    until_ended(script)
    assert only.result().step_id == 0


def test_an_end_does_not_wait_for_new_sequences(script, executor):
    init = SlotInit(0, "r", (1,), 1, Sampling(max_tokens=1))
    first, _ = executor.submit(StepPlan(0)), executor.submit(StepPlan(1, inits=(init,)))
    script.begin.release()
    until_ended(script)
    assert first.result().step_id == 0  # though the second has not begun


def test_an_end_is_told_when_the_next_step_fails_before_it_begins(script, executor):
    script.failing.add(1)
    first, second = executor.submit(StepPlan(0)), executor.submit(StepPlan(1))
    script.begin.release(2)
    until_ended(script)
    assert first.result().step_id == 0
    with pytest.raises(RuntimeError, match="as told"):
        second.result()


def test_closing_tells_the_last_end(script):
    executor = ThreadExecutor(script.step, 4, name="test-steps")
    script.begin.release()
    script.end.release()
    last = executor.submit(StepPlan(0))
    executor.close()
    assert last.done()
    assert last.result().step_id == 0
