"""The same step loop in a thread of this process, as an `EngineClient` and as a blocking iterator for offline use."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from headrace.base.clock import SystemClock
from headrace.base.errors import InvalidInput
from headrace.control.api import (
    Abort,
    EngineInfo,
    EngineState,
    EngineStats,
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
from headrace.engine.endings import REFUSALS, ending
from headrace.engine.loop import EngineLoop

if TYPE_CHECKING:
    from headrace.engine.launch import EngineCore

log = logging.getLogger("headrace.engine")


class QueueInbox:
    """Messages from other threads of this process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()

    def put(self, message: ToEngine) -> None:
        self._queue.put(message)

    def receive(self, wait_s: float | None) -> list[ToEngine]:
        messages: list[ToEngine] = []
        with contextlib.suppress(queue.Empty):
            messages.append(self._queue.get(block=wait_s != 0, timeout=wait_s))
            while True:
                messages.append(self._queue.get_nowait())
        return messages


class InProcessEngine:
    """Runs the loop of an `EngineCore` in a daemon thread. Methods may be called from any thread and event loop.

    A loop that cannot go on ends every request in flight with reason `error` and leaves the engine `dead`: nothing in
    this process could make its memory right again. `engine.process` restarts instead.
    """

    def __init__(self, core: EngineCore, *, overlap: bool = True) -> None:
        self._core = core
        self._state: EngineState = "ready"
        self._stats = EngineStats(free_blocks=core.info.num_blocks, total_blocks=core.info.num_blocks)
        self._flights: dict[str, _Flight] = {}
        self._lock = threading.Lock()
        self._inbox = QueueInbox()
        self._loop = EngineLoop(
            core.scheduler, core.executor, self._inbox, self._receive, clock=SystemClock(), overlap=overlap
        )
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._thread.start()

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def info(self) -> EngineInfo:
        return self._core.info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        import asyncio  # which programs without an event loop need not load

        from headrace.engine.streams import OutputStream

        loop = asyncio.get_running_loop()
        stream = OutputStream(request)
        self.submit(request, lambda output: loop.call_soon_threadsafe(stream.put, output))
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finish is not None:
                    return
        finally:
            self.abandon(request.request_id)

    def stream(self, request: Request) -> Iterator[Output]:
        """Like `generate`, blocking the calling thread while it waits. The request is submitted by the call itself."""
        arrived: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self.submit(request, arrived.put)
        return self._read(request.request_id, arrived)

    def abort(self, request_id: str) -> None:
        self._inbox.put(Abort(request_id))

    async def flush_prefix_cache(self) -> None:
        self._inbox.put(FlushPrefixCache())

    async def close(self, drain_s: float = 0.0) -> None:
        import asyncio

        await asyncio.to_thread(self.stop, drain_s)

    def stop(self, drain_s: float = 0.0) -> None:
        """Close from a thread without an event loop; blocks until the loop has ended and its memory may be freed."""
        if self._state == "ready":
            self._state = "draining"
        self._inbox.put(Shutdown(drain_s))
        self._thread.join()

    def _read(self, request_id: str, arrived: queue.SimpleQueue[Output]) -> Iterator[Output]:
        try:
            while True:
                output = arrived.get()
                yield output
                if output.finish is not None:
                    return
        finally:
            self.abandon(request_id)

    def submit(self, request: Request, sink: Callable[[Output], None]) -> None:
        """Submit; the loop's thread calls `sink` with each output, the last with `finish`. `sink` must not block."""
        flight = _Flight(request, sink)
        with self._lock:
            if request.request_id in self._flights:
                raise InvalidInput(f"request {request.request_id!r} is already in flight", field="request_id")
            state = self._state
            if state == "ready":
                self._flights[request.request_id] = flight
        if state == "ready":
            self._inbox.put(Submit(request))
        else:
            flight.end(FinishReason.ERROR, REFUSALS[state])

    def abandon(self, request_id: str) -> None:
        """Abort a request that nobody reads any more; its sink is not called again. Unknown ids are ignored."""
        with self._lock:
            unfinished = self._flights.pop(request_id, None)
        if unfinished is not None:
            self._inbox.put(Abort(request_id))

    def _receive(self, message: FromEngine) -> None:
        """Called by the loop's thread with what one step produced."""
        if not isinstance(message, StepOutputs):
            return
        self._stats = message.stats
        for output in message.outputs:
            with self._lock:
                flight = self._flights.get(output.request_id)
                if flight is not None and output.finish is not None:
                    del self._flights[output.request_id]
            if flight is not None:
                flight.tokens += len(output.token_ids)
                flight.deliver(output)

    def _run(self) -> None:
        reason, error = FinishReason.ABORT, "the engine was shut down"
        try:
            self._loop.run()
        except Exception as fault:
            log.exception("the engine cannot go on")
            reason, error = FinishReason.ERROR, f"{type(fault).__name__}: {fault}"
        with self._lock:
            self._state = "dead"
            flights = list(self._flights.values())
            self._flights.clear()
        for flight in flights:
            flight.end(reason, error)
        self._core.executor.close()


class _Flight(msgspec.Struct):
    """A request in flight and where its outputs go."""

    request: Request
    sink: Callable[[Output], None]
    tokens: int = 0

    def deliver(self, output: Output) -> None:
        try:
            self.sink(output)
        except RuntimeError:  # its event loop was closed; nobody is left to read
            log.debug("nobody reads request %s", self.request.request_id)

    def end(self, reason: FinishReason, error: str) -> None:
        self.deliver(Output(self.request.request_id, finish=ending(self.request, self.tokens, reason, error)))
