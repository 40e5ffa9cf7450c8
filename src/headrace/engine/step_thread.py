"""An executor that runs its steps one after the other on a thread of its own; the thread's work releases the interpreter."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from headrace.control.step import StepPlan, StepResult


class ThreadStep:
    """A step in flight."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        # A bare lock, held until the step has ended: an Event is several Python calls and locks on both sides.
        self._running = threading.Lock()
        self._running.acquire()
        self._result: StepResult | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return not self._running.locked()

    def result(self) -> StepResult:
        with self._running:
            pass
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def run(self, step: Callable[[StepPlan], StepResult]) -> None:
        try:
            self._result = step(self.plan)
        except BaseException as error:
            self._error = error
        self._running.release()


class ThreadExecutor:
    """See `headrace.control.step.Executor`. `around`: a context that the thread works in."""

    def __init__(
        self,
        step: Callable[[StepPlan], StepResult],
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
        with self._around():
            while (step := self._queue.get()) is not None:
                step.run(self._step)
                del step
