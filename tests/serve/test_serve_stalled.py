"""A client that takes nothing of its answer is cut off after a while; one that is slow is not."""

import asyncio
import json
import logging
import socket

import pytest
import uvicorn
from serve_harness import MODEL, until
from uvicorn.server import ServerState

from headrace.base.errors import InvalidInput
from headrace.control.api import FinishReason
from headrace.serve.config import ServeConfig
from headrace.serve.connection import connections

LIMIT_S = 0.3


async def deaf(server, **fields):
    """A request whose answer nobody will read: its socket, with little room for any of it."""
    server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # also of what it accepts
    body = json.dumps({"model": MODEL, "prompt": [1000], "ignore_eos": True} | fields).encode()
    client = socket.socket()
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    await loop.sock_sendall(client, head.encode() + b"\r\n\r\n" + body)
    return client


async def test_a_client_that_never_reads_its_stream_is_cut_and_its_request_ends(live, caplog):
    server = await live(stall_limit_s=LIMIT_S, max_waiting=0, max_num_seqs=2)
    server.engine.hold_after = 400  # it would run on for ever
    with caplog.at_level(logging.WARNING, "headrace.serve"):
        client = await deaf(server, stream=True, logprobs=20, max_tokens=500)
        (request,) = await started(server)
        await until(lambda: server.app.state.gate.inside == 0)
    assert server.engine.finished[request] is FinishReason.ABORT
    assert server.engine.live == {}
    assert not server.server.server_state.connections
    assert [r.message for r in caplog.records] == [
        "a client read nothing of its answer for 0.3 s: its connection is closed"
    ]
    server.engine.hold_after = None
    assert (await server.complete([1001], max_tokens=50, n=2))["usage"]["completion_tokens"] > 0  # both places are free
    client.close()


async def started(server):
    await until(lambda: server.engine.live)
    return list(server.engine.live)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_complete_and_never_taken_does_not_keep_its_connection(live, stream):
    """Too little to make anyone wait, so that nothing but the connection is held."""
    server = await live(stall_limit_s=LIMIT_S)
    client = await deaf(server, stream=stream, logprobs=20 if stream else 5, max_tokens=50 if stream else 200)
    await started(server)
    await until(lambda: server.app.state.gate.inside == 0)
    assert server.server.server_state.connections
    await until(lambda: not server.server.server_state.connections)
    client.close()


class Wire:
    """A transport of which a test says how much waits in it."""

    def __init__(self):
        self.waiting = 0
        self.aborted = False

    def get_write_buffer_size(self):
        return self.waiting

    def get_extra_info(self, name, default=None):
        return default

    def is_closing(self):
        return self.aborted

    def abort(self):
        self.aborted = True


class Timer:
    def __init__(self, due, call):
        self.due, self.call = due, call

    def cancel(self):
        self.due.remove(self)


class Timers:
    """An event loop's `call_later`, run by hand."""

    def __init__(self):
        self.due = []

    def call_later(self, delay_s, call, *arguments):
        self.due.append(Timer(self.due, lambda: call(*arguments)))
        return self.due[-1]

    def run(self):
        self.due.pop().call()


@pytest.fixture
def connection():
    async def app(scope, receive, send): ...

    config = uvicorn.Config(app, http=connections(60.0))
    config.load()
    made = config.http_protocol_class(config=config, server_state=ServerState(), app_state={}, _loop=Timers())
    made.connection_made(Wire())
    return made


def test_a_client_that_takes_a_byte_within_the_limit_is_kept(connection):
    wire, timers = connection.transport, connection.loop
    wire.waiting = 70_000
    connection.pause_writing()
    for _ in range(50):
        wire.waiting -= 1
        timers.run()
    assert not wire.aborted
    timers.run()
    assert wire.aborted


def test_what_was_taken_between_two_pauses_counts(connection):
    wire, timers = connection.transport, connection.loop
    wire.waiting = 70_000
    connection.pause_writing()
    for _ in range(3):
        wire.waiting = 10_000
        connection.resume_writing()
        wire.waiting = 80_000
        connection.pause_writing()
        assert len(timers.due) == 1
    timers.run()
    assert wire.aborted  # nothing since the last of them
    assert not timers.due


def test_nobody_waits_for_a_connection_with_nothing_to_take(connection):
    wire, timers = connection.transport, connection.loop
    wire.waiting = 70_000
    connection.pause_writing()
    wire.waiting = 0
    connection.resume_writing()
    assert not timers.due


def test_a_lost_connection_leaves_no_timer(connection):
    connection.transport.waiting = 70_000
    connection.pause_writing()
    connection.connection_lost(ConnectionResetError())
    assert not connection.loop.due


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_no_time_is_refused(limit_s):
    with pytest.raises(InvalidInput) as caught:
        ServeConfig(served_names=(MODEL,), stall_limit_s=limit_s)
    assert caught.value.field == "stall_limit_s"
