"""The same step loop in a thread of this process, as an `EngineClient` and as a blocking iterator for offline use."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
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
    import asyncio

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

    def generate(self, request: Request) -> AsyncGenerator[Output]:
        # Brings asyncio, which programs without an event loop need not load.
        from headrace.engine.streams import outputs_of

        return outputs_of(self, request)

    def follow(self, request: Request, sink: Callable[[Output], None]) -> None:
        import asyncio

        self._take_off(_Flight(request, sink, asyncio.get_running_loop()))

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
        self._take_off(_Flight(request, sink))

    def _take_off(self, flight: _Flight) -> None:
        request = flight.request
        with self._lock:
            if request.request_id in self._flights:
                raise InvalidInput(f"request {request.request_id!r} is already in flight", field="request_id")
            state = self._state
            flight.ended = state != "ready"
            if flight.loop is not None or not flight.ended:
                self._flights[request.request_id] = flight
        if state == "ready":
            self._inbox.put(Submit(request))
        else:
            self._end(flight, FinishReason.ERROR, REFUSALS[state])

    def abandon(self, request_id: str) -> None:
        """Abort a request that nobody reads any more; its sink is not called again. Unknown ids are ignored."""
        with self._lock:
            unfinished = self._flights.pop(request_id, None)
        if unfinished is not None:
            unfinished.abandoned = True
            self._inbox.put(Abort(request_id))

    def _receive(self, message: FromEngine) -> None:
        """Called by the loop's thread with what one step produced."""
        if not isinstance(message, StepOutputs):
            return
        self._stats = message.stats
        flying: list[tuple[_Flight, Output]] = []
        with self._lock:
            for output in message.outputs:
                flight = self._flights.get(output.request_id)
                if flight is None:
                    continue
                flying.append((flight, output))
                flight.tokens += len(output.token_ids)
                if output.finish is not None:
                    flight.ended = True
                    if flight.loop is None:
                        del self._flights[output.request_id]
        # Each event loop is woken once for all that a step has made for it.
        batches: dict[asyncio.AbstractEventLoop, list[tuple[_Flight, Output]]] = {}
        for flight, output in flying:
            if flight.loop is None:
                flight.sink(output)
            else:
                batches.setdefault(flight.loop, []).append((flight, output))
        for loop, batch in batches.items():
            self._hand_over(loop, batch)

    def _hand_over(self, loop: asyncio.AbstractEventLoop, batch: list[tuple[_Flight, Output]]) -> None:
        try:
            loop.call_soon_threadsafe(self._deliver, batch)
        except RuntimeError:  # it was closed; nobody is left to read
            for flight, _ in batch:
                self.abandon(flight.request.request_id)

    def _deliver(self, batch: list[tuple[_Flight, Output]]) -> None:
        """Called on an event loop."""
        for flight, output in batch:
            if flight.abandoned:  # while the batch was on its way
                continue
            if output.finish is not None:
                with self._lock:
                    self._flights.pop(output.request_id, None)
            flight.sink(output)

    def _end(self, flight: _Flight, reason: FinishReason, error: str) -> None:
        output = Output(flight.request.request_id, finish=ending(flight.request, flight.tokens, reason, error))
        if flight.loop is None:
            flight.sink(output)
        else:
            self._hand_over(flight.loop, [(flight, output)])

    def _run(self) -> None:
        reason, error = FinishReason.ABORT, "the engine was shut down"
        try:
            self._loop.run()
        except Exception as fault:
            log.exception("the engine cannot go on")
            reason, error = FinishReason.ERROR, f"{type(fault).__name__}: {fault}"
        with self._lock:
            self._state = "dead"
            flights = [flight for flight in self._flights.values() if not flight.ended]
            for flight in flights:
                flight.ended = True
                if flight.loop is None:
                    del self._flights[flight.request.request_id]
        for flight in flights:
            self._end(flight, reason, error)
        self._core.executor.close()


class _Flight(msgspec.Struct):
    """A request in flight and where its outputs go."""

    request: Request
    sink: Callable[[Output], None]
    loop: asyncio.AbstractEventLoop | None = None
    """Where `sink` is called; None: by the engine's thread."""
    tokens: int = 0
    ended: bool = False
    """Its last output is on its way; it stays among the flights until its event loop has it."""
    abandoned: bool = False
