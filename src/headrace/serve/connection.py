"""A client's connection, which is cut when the client takes nothing of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import struct
import sys
import termios
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger("headrace.serve")


def connections(stall_limit_s: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, aborted after `stall_limit_s` seconds in which a client took no byte of what waits for it.

    The abort is a disconnect as any other: the request ends in the engine, its blocks and its places are free. Without
    it a client that never reads would hold them, for nothing else tells it from one that is slow.
    """

    class Connection(_Connection):
        limit_s = stall_limit_s

    return Connection


class _Connection(HttpToolsProtocol):
    limit_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()  # nobody waits for what is less than pauses, and closing does

    def connection_lost(self, exc: Exception | None) -> None:
        if self._check is not None:
            self._check.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Begin to wait for the client anew, if there is anything to take."""
        if self._check is not None:
            self._check.cancel()
            self._check = None
        if self.transport.get_write_buffer_size():
            self._check = self.loop.call_later(self.limit_s, self._checked, self._untaken_bytes())

    def _checked(self, before_bytes: int) -> None:
        self._check = None
        waits = self.flow.write_paused or self._is_idle()
        if not waits or self._untaken_bytes() < before_bytes:
            self._watch()
            return
        log.warning("a client read nothing of its answer for %g s: its connection is closed", self.limit_s)
        self.transport.abort()

    def _is_idle(self) -> bool:
        """Nothing more is written: only then does what waits tell what was taken."""
        return self.cycle is None or self.cycle.response_complete

    def _untaken_bytes(self) -> int:
        """Bytes in our buffer and, on Linux, those in the kernel's that the client has not acknowledged."""
        kernel_bytes = 0
        wire = self.transport.get_extra_info("socket")
        if sys.platform == "linux" and wire is not None:
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                (kernel_bytes,) = struct.unpack("i", fcntl.ioctl(wire.fileno(), termios.TIOCOUTQ, bytes(4)))
        return self.transport.get_write_buffer_size() + kernel_bytes
