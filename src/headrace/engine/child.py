"""The engine process: `python -m headrace.engine.child '{json}'`, started and supervised by `engine.process`.

It connects to its parent, makes the core, says `Ready` (or `Failed`) and runs the step loop. It ends when it is told
to, when the loop cannot go on, or at once when its parent is gone.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from headrace.base.clock import SystemClock
from headrace.base.errors import HeadraceError
from headrace.control.api import Failed, FromEngine, Ready, ToEngine
from headrace.engine.loop import EngineLoop
from headrace.spec.config import EngineConfig

log = logging.getLogger("headrace.engine")


class Orders(msgspec.Struct, frozen=True):
    """What a parent tells its engine process on the command line.

    `core`: `module:function` that makes an `EngineCore` from an `EngineConfig`. `folder`: the private folder of the
    sockets, removed by whoever of the two is left.
    """

    config: EngineConfig
    core: str
    to_engine: str
    from_engine: str
    folder: str
    parent_pid: int
    log_level: str = "INFO"


class SocketInbox:
    """Messages from the parent. `fileno` wakes nothing by itself: waiting is ZeroMQ's poll, which sleeps."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def receive(self, wait_s: float | None) -> list[ToEngine]:
        if wait_s != 0:
            self._socket.poll(None if wait_s is None else max(1, int(wait_s * 1000)))
        messages: list[ToEngine] = []
        while True:
            try:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages


def load_core(path: str) -> Callable[[EngineConfig], object]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def failure(error: BaseException) -> Failed:
    """An error as a message; anything unforeseen becomes an `EngineDead` that keeps its type in the text."""
    if isinstance(error, HeadraceError):
        return Failed(type(error).__name__, error.message, error.field, error.remedy)
    return Failed("EngineDead", f"{type(error).__name__}: {error}")


def main(argv: list[str]) -> int:
    orders = msgspec.json.decode(argv[0], type=Orders)
    # Signals that reach the whole process group are the parent's to act on: it drains first, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(
        level=orders.log_level, format="%(asctime)s %(levelname)s engine: %(message)s", stream=sys.stderr
    )
    threading.Thread(target=_follow_parent, args=(orders,), name="follow-parent", daemon=True).start()

    context = zmq.Context()
    outbox: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    # No high-water mark: the loop must never wait for its reader, and the reader only sorts messages into streams.
    outbox.set(zmq.SNDHWM, 0)
    outbox.set(zmq.LINGER, 2000)
    outbox.connect(orders.from_engine)
    inbox: zmq.Socket[bytes] = context.socket(zmq.PULL)
    inbox.set(zmq.RCVHWM, 0)
    inbox.set(zmq.LINGER, 0)
    inbox.bind(orders.to_engine)
    encoder = msgspec.msgpack.Encoder()

    def emit(message: FromEngine) -> None:
        outbox.send(encoder.encode(message))

    code = 1
    try:
        core = load_core(orders.core)(orders.config)
        # What was made so far stays to the end; the collector need not walk through it between steps.
        gc.freeze()
        emit(Ready(core.info))
        EngineLoop(
            core.scheduler,
            core.executor,
            SocketInbox(inbox),
            emit,
            clock=SystemClock(),
            overlap=orders.config.overlap,
        ).run()
        core.executor.close()
        code = 0
    except Exception as error:
        if not isinstance(error, HeadraceError):
            log.exception("the engine cannot go on")
        emit(failure(error))
    outbox.close()
    inbox.close()
    context.term()
    return code


def _follow_parent(orders: Orders) -> None:
    """End with the parent: its end of our stdin closes when it dies, however it dies.

    A process that the parent forked may keep that end open, so the parent's id is looked at as well.
    """
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 2.0)
        if (readable and not os.read(sys.stdin.fileno(), 1)) or os.getppid() != orders.parent_pid:
            shutil.rmtree(Path(orders.folder), ignore_errors=True)
            os._exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
