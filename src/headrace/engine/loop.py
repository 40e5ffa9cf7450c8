"""The step loop: take messages, plan step n+1 while step n runs, commit n, tell what came of it.

A step that fails as a whole (its executor raised) says nothing about who is at fault, and leaves every slot undefined.
So everything in flight is withdrawn, running requests go back to waiting (they are computed again, with the same
results, since a request's random stream depends on its seed alone), and those that took part in the failed step make
their next `PROBATION_TOKENS` tokens one at a time. One that fails alone is at fault and ends with an error; one that does
not is cleared. A fault that shows only in company is never pinned on anyone, but each round brings everyone forward.
When `MAX_FAILURES_IN_A_ROW` steps fail with none succeeding between, the executor itself is broken and the loop ends with
`EngineDead`; its supervisor starts a new process.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol, assert_never

import msgspec

from headrace.base.clock import Clock
from headrace.base.errors import EngineDead, HeadraceError
from headrace.control.api import (
    Abort,
    FinishReason,
    FlushPrefixCache,
    FromEngine,
    Output,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
)
from headrace.control.request import Request
from headrace.control.scheduler import Scheduler
from headrace.control.step import Executor, StepHandle, StepPlan
from headrace.engine.endings import ending

log = logging.getLogger("headrace.engine")

MAX_FAILURES_IN_A_ROW = 4
# The first token comes from a step that computes all tokens again, the second from one like those that failed.
PROBATION_TOKENS = 2
READER_S = 0.0005
"""What those who were told the last tokens get to read them before the loop tidies up after their requests."""


class Inbox(Protocol):
    def receive(self, wait_s: float | None) -> list[ToEngine]:
        """Messages that have arrived, in order. Waits up to `wait_s` for the first one, without end if None, asleep."""
        ...


class _Flight(msgspec.Struct, frozen=True):
    """A step in flight and whose chunks it computes."""

    plan: StepPlan
    request_ids: tuple[str, ...]
    handle: StepHandle


class EngineLoop:
    """Runs a scheduler's plans on an executor until told to stop. Belongs to the thread that calls `run`."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        inbox: Inbox,
        emit: Callable[[FromEngine], None],
        *,
        clock: Clock,
        overlap: bool = True,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._idle: Callable[[], bool] | None = getattr(executor, "idle", None)
        self._inbox = inbox
        self._emit = emit
        self._clock = clock
        # One step runs while the next is planned and queued behind it.
        self._depth = 2 if overlap else 1
        self._in_flight: deque[_Flight] = deque()
        self._live: set[str] = set()
        self._slots: dict[int, str] = {}
        self._suspects: deque[str] = deque()
        self._cleared = 0
        """Tokens that the first suspect has made alone."""
        self._failures_in_a_row = 0
        self._stop_at_s: float | None = None

    def run(self) -> None:
        """Serve until `Shutdown`. Raises `EngineDead` when the executor is broken, and what the scheduler raises if it
        breaks its own rules; requests still in flight then get no ending from here."""
        while not self._stopping():
            outputs = self._take_messages()
            if self._scheduler.has_work():
                outputs += self._step()
                self._tell(outputs)
            elif outputs:
                self._tell(outputs)
        self._end()

    def _stopping(self) -> bool:
        if self._stop_at_s is None:
            return False
        return not self._live or self._clock.now() >= self._stop_at_s

    def _take_messages(self) -> list[Output]:
        """Act on every message that is there; with nothing to compute, sleep until one comes."""
        outputs: list[Output | None] = []
        for message in self._messages():
            match message:
                case Submit(request):
                    outputs.append(self._accept(request))
                case Abort(request_id):
                    outputs.append(self._scheduler.abort(request_id))
                    self._live.discard(request_id)
                case FlushPrefixCache():
                    self._scheduler.flush_prefix()
                case Shutdown(drain_s):
                    self._stop_at_s = self._clock.now() + drain_s
                case _:
                    assert_never(message)
        return [output for output in outputs if output is not None]

    def _messages(self) -> list[ToEngine]:
        if self._scheduler.has_work():
            return self._inbox.receive(0)
        if self._scheduler.unsettled:
            # Not at once: a thread of this process that was just told something cannot run before this one waits, and the
            # interpreter lets it wait for 5 ms.
            if messages := self._inbox.receive(READER_S):
                return messages
            self._scheduler.settle()
            self._emit(StepOutputs((), self._scheduler.stats()))  # no step will tell them
        if self._idle is not None:
            while True:
                if messages := self._inbox.receive(0):
                    return messages
                if not self._idle():
                    break
        return self._inbox.receive(None)

    def _accept(self, request: Request) -> Output | None:
        """None, or why the request is refused. A doubled id is ignored: its ending would end the first request."""
        if self._stop_at_s is not None:
            reason = "the engine is shutting down"
            return Output(request.request_id, finish=ending(request, 0, FinishReason.ABORT, reason))
        if request.request_id in self._live:
            log.error("a second request with the id %r of a live one was dropped", request.request_id)
            return None
        refusal = self._scheduler.submit(request)
        if refusal is None:
            self._live.add(request.request_id)
        return refusal

    def _step(self) -> list[Output]:
        """Issue as many steps as may be in flight, then wait for the oldest and commit it."""
        depth = 1 if self._suspects else self._depth
        while len(self._in_flight) < depth:
            alone = self._suspect()
            plan = self._scheduler.plan(alone)
            if plan is None:
                break
            self._slots.update((init.slot, init.request_id) for init in plan.inits)
            request_ids = tuple(self._slots[chunk.slot] for chunk in plan.chunks)
            try:
                self._in_flight.append(_Flight(plan, request_ids, self._executor.submit(plan)))
            except Exception as error:
                return self._recover(request_ids, error)
        if not self._in_flight:
            return []
        flight = self._in_flight.popleft()
        try:
            result = flight.handle.result()
        except Exception as error:
            return self._recover(flight.request_ids, error)
        self._failures_in_a_row = 0
        outputs = self._scheduler.commit(flight.plan, result)
        if self._suspects and any(output.request_id == self._suspects[0] for output in outputs):
            self._cleared += 1
            if self._cleared == PROBATION_TOKENS:
                self._next_suspect()
        return outputs

    def _next_suspect(self) -> None:
        self._suspects.popleft()
        self._cleared = 0

    def _suspect(self) -> str | None:
        """The request to be run alone, if any; those that ended meanwhile are passed over."""
        while self._suspects and self._suspects[0] not in self._live:
            self._next_suspect()
        return self._suspects[0] if self._suspects else None

    def _recover(self, request_ids: tuple[str, ...], error: Exception) -> list[Output]:
        """Make the engine whole after a step that raised; returns the ending of the request at fault, if that is known."""
        self._failures_in_a_row += 1
        log.error("a step of %d requests failed", len(request_ids), exc_info=error)
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise EngineDead(
                f"{self._failures_in_a_row} steps in a row failed, the last with {describe(error)}"
            ) from error
        self._in_flight.clear()
        self._executor.reset()
        self._scheduler.withdraw()
        if len(request_ids) > 1:
            self._suspects, self._cleared = deque(request_ids), 0
            return []
        output = self._scheduler.abort(request_ids[0])
        if output is None or output.finish is None:  # it was aborted while its step ran
            return []
        finish = msgspec.structs.replace(output.finish, reason=FinishReason.ERROR, error=describe(error))
        return [msgspec.structs.replace(output, finish=finish)]

    def _tell(self, outputs: list[Output]) -> None:
        self._live.difference_update(output.request_id for output in outputs if output.finish is not None)
        self._emit(StepOutputs(tuple(outputs), self._scheduler.stats()))

    def _end(self) -> None:
        """End what is left with `abort` and wait for the steps in flight, whose results nobody wants any more."""
        aborted = [self._scheduler.abort(request_id) for request_id in self._live]
        self._tell([output for output in aborted if output is not None])
        for flight in self._in_flight:
            with contextlib.suppress(Exception):
                flight.handle.result()
        self._in_flight.clear()


def describe(error: BaseException) -> str:
    return str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
