"""An engine in a process of its own, as an `EngineClient`: started, watched, restarted and ended from here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import msgspec

from headrace.base import errors
from headrace.base.errors import EngineDead, HeadraceError, InvalidInput
from headrace.control.api import (
    Abort,
    EngineInfo,
    EngineState,
    EngineStats,
    Failed,
    FinishReason,
    FlushPrefixCache,
    FromEngine,
    Output,
    Ready,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
)
from headrace.control.request import Request
from headrace.engine.channel import Frames, framed
from headrace.engine.child import Orders
from headrace.engine.endings import REFUSALS, ending
from headrace.engine.streams import outputs_of
from headrace.spec.config import EngineConfig

log = logging.getLogger("headrace.engine")

DEFAULT_CORE = "headrace.engine.launch:launch"
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class Supervision:
    """How an engine process is watched.

    `stall_timeout_s`: with requests in flight and not one step committed for that long, the process counts as hung and
    is killed. `max_restarts`: so many in a row, with less than `healthy_s` of service between, then the engine is dead.
    """

    start_timeout_s: float = 900.0
    stall_timeout_s: float = 300.0
    stop_timeout_s: float = 5.0
    max_restarts: int = 5
    healthy_s: float = 60.0
    backoff_s: float = 0.2
    max_backoff_s: float = 10.0


class EngineProcessClient:
    """Runs one engine in a child process. Belongs to the event loop it was started on.

    `start` raises what kept the engine from starting, with its own error type. From then on nothing raises for an
    engine's fault: when the process dies, every request in flight ends with reason `error`, `state` is `restarting`
    and a new process is started; requests that come meanwhile end with `error` at once.
    """

    def __init__(
        self, config: EngineConfig, *, core: str = DEFAULT_CORE, supervision: Supervision | None = None
    ) -> None:
        self.config = config
        self.restarts = 0
        self._core = core
        self._rules = supervision or Supervision()
        self._state: EngineState = "starting"
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._flights: dict[str, _Flight] = {}
        self._child: _Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_step_s = time.monotonic()

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDead("the engine has not started")
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def pid(self) -> int | None:
        """Process id of the running engine, None while there is none."""
        return None if self._child is None else self._child.pid

    async def start(self) -> EngineInfo:
        """Start the engine and wait until it is ready."""
        try:
            self._child = await self._launch()
        except BaseException:
            self._state = "dead"
            raise
        self._state = "ready"
        self._supervisor = asyncio.create_task(self._supervise(self._child))
        return self.info

    def generate(self, request: Request) -> AsyncGenerator[Output]:
        return outputs_of(self, request)

    def follow(self, request: Request, sink: Callable[[Output], None]) -> None:
        if request.request_id in self._flights:
            raise InvalidInput(f"request {request.request_id!r} is already in flight", field="request_id")
        flight = _Flight(request, sink)
        if self._state != "ready" or self._child is None:
            flight.end(FinishReason.ERROR, REFUSALS[self._state])
            return
        if not self._flights:
            self._last_step_s = time.monotonic()
        self._flights[request.request_id] = flight
        self._idle.clear()
        self._child.send(Submit(request))

    def abandon(self, request_id: str) -> None:
        if self._forget(request_id) is not None and self._child is not None:
            self._child.send(Abort(request_id))

    def abort(self, request_id: str) -> None:
        if request_id in self._flights and self._child is not None:
            self._child.send(Abort(request_id))

    async def flush_prefix_cache(self) -> None:
        if self._child is not None:
            self._child.send(FlushPrefixCache())

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let those in flight finish for `drain_s`, end the rest with `abort`, stop the process."""
        if self._state != "dead":
            self._state = "draining"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), max(drain_s, 0.0))
        self._end_all(FinishReason.ABORT, "the engine was shut down")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
            self._supervisor = None
        if self._child is not None:
            child, self._child = self._child, None
            child.send(Shutdown())
            await child.dispose(self._rules.stop_timeout_s)
        self._state = "dead"

    async def _launch(self) -> _Child:
        child = _Child(self.config, self._core, self._receive)
        try:
            async with asyncio.timeout(self._rules.start_timeout_s):
                await child.connect()
                await asyncio.wait([child.ready, child.exited], return_when=asyncio.FIRST_COMPLETED)
            if not child.ready.done():
                raise child.failure(f"the engine process ended with code {child.exited.result()} while starting")
            self._info = child.ready.result()
            self._stats = EngineStats(free_blocks=self._info.num_blocks, total_blocks=self._info.num_blocks)
            return child
        except TimeoutError:
            await child.dispose(0)
            raise EngineDead(f"the engine was not ready after {self._rules.start_timeout_s:g} s") from None
        except BaseException:
            await child.dispose(0)
            raise

    async def _supervise(self, child: _Child) -> None:
        failures = 0
        started_s = time.monotonic()
        while True:
            reason = await self._watch(child)
            log.error("%s; %d requests in flight end with an error", reason, len(self._flights))
            self._child = None
            draining = self._state == "draining"
            if not draining:
                self._state = "restarting"
            self._end_all(FinishReason.ERROR, reason)
            await child.dispose(0)
            if draining:
                return
            failures = 0 if time.monotonic() - started_s > self._rules.healthy_s else failures
            while True:
                failures += 1
                if failures > self._rules.max_restarts:
                    log.error("the engine failed %d times in a row and is not started again", failures)
                    self._state = "dead"
                    return
                await asyncio.sleep(min(self._rules.backoff_s * 2 ** (failures - 1), self._rules.max_backoff_s))
                try:
                    child = await self._launch()
                    break
                except (HeadraceError, OSError) as error:
                    log.error("the engine did not start again: %s", error)
            self._child = child
            self._state = "ready"
            self.restarts += 1
            started_s = time.monotonic()
            log.warning("the engine runs again as process %d", child.pid)

    async def _watch(self, child: _Child) -> str:
        """Return why `child` no longer serves; a hung process is as good as dead."""
        limit_s = self._rules.stall_timeout_s
        while True:
            done, _ = await asyncio.wait([child.exited], timeout=limit_s / 4)
            if done:
                return str(child.failure(f"the engine process ended with code {child.exited.result()}"))
            if self._flights and time.monotonic() - self._last_step_s > limit_s:
                child.kill()
                return f"the engine made no step for {limit_s:g} s and was killed"

    def _receive(self, message: StepOutputs) -> None:
        self._last_step_s = time.monotonic()
        self._stats = message.stats
        flights = self._flights
        for output in message.outputs:
            flight = flights.get(output.request_id)
            if flight is None:  # abandoned meanwhile
                continue
            if output.finish is not None:
                self._forget(output.request_id)
            flight.tokens += len(output.token_ids)
            try:
                flight.sink(output)
            except Exception:  # against its contract; the others of this message, and the channel, must not suffer
                log.exception("who follows request %r failed on its output", output.request_id)
                self.abandon(output.request_id)

    def _forget(self, request_id: str) -> _Flight | None:
        flight = self._flights.pop(request_id, None)
        if not self._flights:
            self._idle.set()
        return flight

    def _end_all(self, reason: FinishReason, error: str) -> None:
        for request_id, flight in list(self._flights.items()):
            if self._forget(request_id) is not None:  # not abandoned by the sink of another
                flight.end(reason, error)


class _Flight(msgspec.Struct):
    """A request in flight and where its outputs go."""

    request: Request
    sink: Callable[[Output], None]
    tokens: int = 0

    def end(self, reason: FinishReason, error: str) -> None:
        """End the request from this side, because the engine cannot any more."""
        self.sink(Output(self.request.request_id, finish=ending(self.request, self.tokens, reason, error)))


class _Child(asyncio.Protocol):
    """One engine process and this end of its channel. `ready` and `exited` are futures of the loop it was made on."""

    def __init__(self, config: EngineConfig, core: str, receive: Callable[[StepOutputs], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._failed: Failed | None = None
        self.ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._hung_up = False
        self._code: int | None = None
        self._socket, theirs = socket.socketpair()
        orders = Orders(
            config=config,
            core=core,
            socket=theirs.fileno(),
            parent_pid=os.getpid(),
            log_level=logging.getLevelName(log.getEffectiveLevel()),
        )
        # Not multiprocessing: it would import the caller's main module again. stdin is the line that tells the child
        # that this process is gone.
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.engine.child", msgspec.json.encode(orders).decode()],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
        self.pid = self._process.pid
        threading.Thread(target=self._wait, name=f"wait-{self.pid}", daemon=True).start()

    async def connect(self) -> None:
        """Begin to listen; nothing is lost that the process says before."""
        self._transport, _ = await self._loop.create_unix_connection(lambda: self, sock=self._socket)

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks. To a dead process it goes nowhere."""
        if self._transport is not None and not self._hung_up:
            self._transport.write(framed(self._encoder.encode(message)))

    def failure(self, otherwise: str) -> HeadraceError:
        """What the process said about its end, as the error it was; `otherwise` if it said nothing."""
        if self._failed is None:
            return EngineDead(otherwise)
        kind = getattr(errors, self._failed.kind, EngineDead)
        return kind(self._failed.message, field=self._failed.field, remedy=self._failed.remedy)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    async def dispose(self, patience_s: float) -> None:
        """Wait `patience_s` for the process to end by itself, then kill it; leaves no process or socket behind."""
        done, _ = await asyncio.wait([self.exited], timeout=patience_s) if patience_s > 0 else (set(), set())
        if not done:
            self.kill()
            await asyncio.wait([self.exited])
        if self._transport is not None:
            self._transport.abort()
        else:
            self._socket.close()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.take(data):
            match self._decoder.decode(frame):
                case StepOutputs() as outputs:
                    self._receive(outputs)
                case Ready(info):
                    if not self.ready.done():
                        self.ready.set_result(info)
                case Failed() as failed:
                    self._failed = failed

    def connection_lost(self, error: Exception | None) -> None:
        self._hung_up = True
        if self._code is not None:
            self._end()

    def _wait(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop was closed without close()
            self._loop.call_soon_threadsafe(self._on_exit, code)

    def _on_exit(self, code: int) -> None:
        self._code = code
        if self._hung_up or self._transport is None:
            self._end()
        else:  # what it still said comes before its end; who else might hold its end of the socket is not waited for
            self._loop.call_later(_LAST_WORDS_S, self._end)

    def _end(self) -> None:
        if not self.exited.done():
            assert self._code is not None
            self.exited.set_result(self._code)
