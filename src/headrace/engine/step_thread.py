"""An executor that runs its steps one after the other on a thread of its own; the thread's work releases the interpreter."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from headrace.control.step import StepPlan, StepResult


class Step(Protocol):
    def __call__(self, plan: StepPlan, begun: Callable[[], None], /) -> StepResult:
        """Run a step; `begun` is to be called once its arithmetic begins, which releases the interpreter."""
        ...


class ThreadStep:
    """A step in flight."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        # A bare lock, held until the end has been told: an Event is several Python calls and locks on both sides.
        self._untold = threading.Lock()
        self._untold.acquire()
        self._told = False
        self._result: StepResult | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return not self._untold.locked()

    def result(self) -> StepResult:
        with self._untold:
            pass
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def run(self, step: Step, begun: Callable[[], None]) -> None:
        try:
            self._result = step(self.plan, begun)
        except BaseException as error:
            self._error = error

    def tell(self) -> None:
        """Let those who wait for the result have it. For the thread that ran the step; again is nothing."""
        if not self._told:
            self._told = True
            self._untold.release()


class ThreadExecutor:
    """See `headrace.control.step.Executor`. `around`: a context that the thread works in.

    The end of a step is told when the next one, if it is there, has begun: who waits for it wants the interpreter, which the
    next step needs too until then, while all cores wait for it.
    """

    def __init__(
        self,
        step: Step,
        max_num_seqs: int,
        *,
        name: str,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._step = step
        self._max_num_seqs = max_num_seqs
        self._around = around
        self._queue: queue.SimpleQueue[ThreadStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._closed = False
        self._thread.start()

    def submit(self, plan: StepPlan) -> ThreadStep:
        if self._closed:
            raise RuntimeError("the executor is closed")
        step = ThreadStep(plan)
        self._queue.put(step)
        return step

    def reset(self) -> None:
        """Let what was submitted run out, whatever comes of it, then release every slot."""
        self.submit(StepPlan(-1, releases=tuple(range(self._max_num_seqs)))).result()

    def close(self) -> None:
        """Finish what was submitted, then end the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        tell: Callable[[], None] = _nothing  # the end of the step before
        with self._around():
            while (step := self._next(tell)) is not None:
                if step.plan.inits:  # new sequences may take long to take in, a grammar for one
                    tell()
                step.run(self._step, tell)
                tell()
                tell = step.tell
        tell()

    def _next(self, tell: Callable[[], None]) -> ThreadStep | None:
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            tell()
            return self._queue.get()


def _nothing() -> None:
    pass
