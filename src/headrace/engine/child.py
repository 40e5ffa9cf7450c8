"""The engine process: `python -m headrace.engine.child '{json}'`, started and supervised by `engine.process`.

It makes the core, says `Ready` (or `Failed`) to its parent and runs the step loop. It ends when it is told to, when the
loop cannot go on, or at once when its parent is gone.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable

import msgspec

from headrace.base.clock import SystemClock
from headrace.base.errors import HeadraceError
from headrace.control.api import Failed, FromEngine, Ready, Shutdown, ToEngine
from headrace.engine.channel import Line
from headrace.engine.loop import EngineLoop
from headrace.spec.config import EngineConfig

log = logging.getLogger("headrace.engine")


class Orders(msgspec.Struct, frozen=True):
    """What a parent tells its engine process on the command line.

    `core`: `module:function` that makes an `EngineCore` from an `EngineConfig`. `socket`: the descriptor, inherited, over
    which the two talk.
    """

    config: EngineConfig
    core: str
    socket: int
    parent_pid: int
    log_level: str = "INFO"


class LineInbox:
    """Messages from the parent; one that has hung up counts as a `Shutdown`."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def receive(self, wait_s: float | None) -> list[ToEngine]:
        messages = [self._decoder.decode(message) for message in self._line.receive(wait_s)]
        return [*messages, Shutdown()] if self._line.ended else messages


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

    parent = socket.socket(fileno=orders.socket)
    parent.set_inheritable(False)
    line = Line(parent)
    encoder = msgspec.msgpack.Encoder()

    def emit(message: FromEngine) -> None:
        line.send(encoder.encode(message))

    code = 1
    try:
        core = load_core(orders.core)(orders.config)
        # What was made so far stays to the end; the collector need not walk through it between steps.
        gc.freeze()
        emit(Ready(core.info))
        EngineLoop(
            core.scheduler,
            core.executor,
            LineInbox(line),
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
    line.close(linger_s=2.0)
    return code


def _follow_parent(orders: Orders) -> None:
    """End with the parent: its end of our stdin closes when it dies, however it dies.

    A process that the parent forked may keep that end open, so the parent's id is looked at as well.
    """
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 2.0)
        if (readable and not os.read(sys.stdin.fileno(), 1)) or os.getppid() != orders.parent_pid:
            os._exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
