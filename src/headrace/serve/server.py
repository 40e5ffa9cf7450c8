"""Running the application: uvicorn, and an orderly end on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from headrace.base.errors import InvalidInput
from headrace.serve.connection import connections
from headrace.serve.gate import Gate

log = logging.getLogger("headrace.serve")


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process by the signal instead of with code 0."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # what was wrong has been logged
            where = f"{self.config.host}:{self.config.port}"
            raise InvalidInput(f"cannot listen on {where}", field="port", remedy="choose another") from None
        if self.started:
            self._listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(
    app: Starlette,
    *,
    host: str,
    port: int,
    drain_s: float,
    stall_limit_s: float,
    access_log: bool = False,
    listening: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return; raises `InvalidInput` if the address is taken.

    `listening` is called once clients can connect. `access_log` logs each request at level info as `uvicorn.access`.

    Draining: new requests get 503, running ones may finish for `drain_s` seconds, the rest ends with an error. A
    second signal ends the wait. A client that takes nothing of its answer for `stall_limit_s` seconds is cut off.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="none",
        http=connections(stall_limit_s),
        ws="none",
        log_config=None,  # its lines go where ours go, in our format
        log_level="warning",
        access_log=access_log,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        lifespan="on",
    )
    if access_log:  # a line of it is of level info
        requests = logging.getLogger("uvicorn.access")
        requests.setLevel(logging.INFO)
        requests.propagate = True
    server = _Server(config, listening)
    gate: Gate = app.state.gate
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    hurried = asyncio.Event()

    def on_signal() -> None:
        (hurried if signalled.is_set() else signalled).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    gc.freeze()  # modules, routes and the tokenizer stay to the end; the collector need not walk through them
    serving = asyncio.create_task(server.serve())
    asked = asyncio.create_task(signalled.wait())
    try:
        await asyncio.wait([serving, asked], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await _drain(gate, hurried, drain_s)
            server.should_exit = True
        await serving
    finally:
        asked.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _drain(gate: Gate, hurried: asyncio.Event, drain_s: float) -> None:
    gate.draining = True
    log.warning("shutting down: %d sequences may finish within %g s", gate.inside, drain_s)
    waits = [asyncio.create_task(gate.idle.wait()), asyncio.create_task(hurried.wait())]
    await asyncio.wait(waits, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if gate.inside:
        log.warning("%d sequences are not finished and end now", gate.inside)
        gate.cut()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(gate.idle.wait(), 2.0)
