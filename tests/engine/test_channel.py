"""The channel to an engine process: messages arrive whole and in order however the stream is cut, and sending never blocks."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from headrace.engine.channel import Frames, Line, framed


@pytest.fixture
def ends() -> Iterator[tuple[Line, Line]]:
    one, other = (Line(s) for s in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_messages_survive_any_cutting():
    draw = random.Random(0)
    for _ in range(200):
        messages = [draw.randbytes(draw.choice((0, 1, 3, 4, 5, 300, 5000))) for _ in range(draw.randrange(8))]
        stream = b"".join(framed(m) for m in messages)
        frames, found, at = Frames(), [], 0
        while at < len(stream):
            step = draw.choice((1, 2, 7, 100, 10_000))
            found += frames.take(stream[at : at + step])
            at += step
        assert found == messages


def test_sending_to_who_does_not_read_returns_and_loses_nothing(ends):
    one, other = ends
    draw = random.Random(1)
    messages = [draw.randbytes(200_000) for _ in range(40)]  # far more than a socket holds
    for message in messages:
        one.send(message)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: [found.extend(other.receive(20)) for _ in messages if len(found) < 40])
    reader.start()
    assert one.receive(0.2) == []  # what waits is sent meanwhile
    other_said = framed(b"x")  # and with the next message
    one.send(other_said)
    deadline_s = time.monotonic() + 20
    while reader.is_alive() and time.monotonic() < deadline_s:
        one.receive(0.01)
    reader.join(20)
    while len(found) < 41:
        found += other.receive(20)
    assert found == [*messages, other_said]


def test_what_waits_to_be_sent_goes_on_also_while_nobody_sleeps(ends):
    one, other = ends
    message = bytes(4_000_000)  # far more than a socket holds
    one.send(message)
    found: list[bytes] = []
    for _ in range(1000):
        found += other.receive(0)
        assert one.receive(0) == []
    assert found == [message]


def test_receiving_waits_as_long_as_asked(ends):
    one, other = ends
    assert one.receive(0) == []
    begun_s = time.monotonic()
    assert one.receive(0.05) == []
    assert time.monotonic() - begun_s >= 0.05
    threading.Timer(0.05, lambda: other.send(b"late")).start()
    assert one.receive(None) == [b"late"]


def test_a_hung_up_end_is_noticed_after_what_it_said(ends):
    one, other = ends
    other.send(b"last")
    other.close()
    assert one.receive(None) == [b"last"]
    assert one.receive(None) == []
    assert one.ended
    one.send(b"to nobody")


def test_what_was_said_before_hanging_up_arrives_also_where_something_waits_to_be_sent(ends):
    one, other = ends
    one.send(bytes(4_000_000))
    other.send(b"last")
    other.close()
    one.send(b"to nobody")
    assert one.receive(0) == [b"last"]
    assert one.receive(0) == []
    assert one.ended


def test_closing_waits_for_a_reader_that_is_slow():
    mine, theirs = socket.socketpair()
    one, other = Line(mine), Line(theirs)
    big = bytes(3_000_000)
    one.send(big)
    closer = threading.Thread(target=one.close, args=(20.0,))
    closer.start()
    found: list[bytes] = []
    while not other.ended:
        found += other.receive(20)
    closer.join(20)
    assert found == [big]
    other.close()
