"""What passes between a front-end and its engine process: messages over one socket, each behind its length.

A socket and no message library: with one each message went through a thread of its own on either side, and on a CPU those
threads took turns with the model's.
"""

from __future__ import annotations

import select
import socket
import struct
import time

_LENGTH = struct.Struct("<I")
_PIECE = 1 << 18
"""Bytes read at once."""


def framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Cuts a stream of bytes into the messages that it carries."""

    def __init__(self) -> None:
        self._held = bytearray()

    def take(self, data: bytes) -> list[bytes]:
        """Messages that are complete once `data` has arrived."""
        held = self._held
        held += data
        messages, at = [], 0
        while len(held) - at >= _LENGTH.size:
            begin = at + _LENGTH.size
            end = begin + _LENGTH.unpack_from(held, at)[0]
            if end > len(held):
                break
            messages.append(bytes(held[begin:end]))
            at = end
        del held[:at]
        return messages


class Line:
    """One end of a channel for a thread without an event loop. Sending never blocks: what the other end does not take yet is
    kept, and sent with the next message or by `receive`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._frames = Frames()
        self._unsent = bytearray()
        self.ended = False
        """Whether the other end has hung up; then nothing comes any more, and what is sent goes nowhere."""

    def send(self, message: bytes) -> None:
        self._unsent += framed(message)
        self._flush()

    def receive(self, wait_s: float | None) -> list[bytes]:
        """Messages that have arrived, in order. Waits up to `wait_s` for the first one, asleep; without end if None."""
        self._flush()
        messages = self._arrived()
        until_s = None if wait_s is None else time.monotonic() + wait_s
        while not messages and not self.ended and (until_s is None or time.monotonic() < until_s):
            self._wait(until_s, select.POLLIN)
            self._flush()
            messages = self._arrived()
        return messages

    def close(self, linger_s: float = 0.0) -> None:
        """Hang up, after up to `linger_s` for what is not sent yet."""
        until_s = time.monotonic() + linger_s
        while self._unsent and not self.ended and time.monotonic() < until_s:
            self._wait(until_s, 0)
            self._flush()
        self._socket.close()

    def _wait(self, until_s: float | None, for_events: int) -> None:
        poll = select.poll()
        poll.register(self._socket, for_events | (select.POLLOUT if self._unsent else 0))
        poll.poll(None if until_s is None else max(0.0, until_s - time.monotonic()) * 1e3)

    def _arrived(self) -> list[bytes]:
        messages: list[bytes] = []
        while not self.ended:
            try:
                data = self._socket.recv(_PIECE)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self.ended = not data
            messages += self._frames.take(data)
            if len(data) < _PIECE:
                break
        return messages

    def _flush(self) -> None:
        while self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                return
            except ConnectionError:  # not the end yet: what the other end said before it hung up is still to be read
                self._unsent.clear()
