"""What one step makes for many streams is written in one turn of the event loop: slow readers, leavers and faults in it."""

import asyncio
import json
import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from scripted_engine import ScriptedEngine
from serve_harness import EOS, MODEL, parse_events, until

from headrace.control.api import Finish, FinishReason, Output
from headrace.serve.app import create_app
from headrace.serve.begun import begun
from headrace.serve.config import ServeConfig
from headrace.serve.front import TextEvent
from headrace.serve.generation import MOST_AT_ONCE
from headrace.serve.metrics import LoopHistogram

WORDS = [2000, 3000, 4000, 5000, 6000]


class Stepped(ScriptedEngine):
    """Gives each live request the next word in one turn of the event loop, as an engine's step does."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.sinks = {}
        self.made = 0
        self.abandoned = []

    def follow(self, request, sink):
        self.sinks[request.request_id] = sink

    def abandon(self, request_id):
        if self.sinks.pop(request_id, None) is not None:
            self.abandoned.append(request_id)

    def step(self, *, last=False):
        word = WORDS[self.made % len(WORDS)]
        self.made += 1
        finish = Finish(FinishReason.LENGTH, 1, self.made, 0) if last else None
        for request_id in list(self.sinks):
            sink = self.sinks.get(request_id)
            if sink is None:  # abandoned by the sink of another
                continue
            if last:
                del self.sinks[request_id]
            sink(Output(request_id, (word,), finish=finish))


class Exchange:
    """One streamed request to the application, whose `send` waits while `open` is not set."""

    def __init__(self, app, path="/v1/completions", **fields):
        self.open = asyncio.Event()
        self.open.set()
        self.sent = []
        self.on_send = lambda: None
        self.gone = asyncio.Event()
        prompt = {"prompt": [1000]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
        self._body = json.dumps({"model": MODEL, "stream": True, "max_tokens": 400} | prompt | fields).encode()
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
                 "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "root_path": ""}  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self):
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        await self.open.wait()
        self.sent.append(message.get("body", b""))
        self.on_send()

    @property
    def text(self):
        return b"".join(self.sent).decode()

    @property
    def choices(self):
        return [choice for event in parse_events(self.text) for choice in event.get("choices", [])]


@pytest.fixture
def engine(tokenizer):
    return Stepped(tokenizer)


@pytest.fixture
def app(engine, tokenizer, template):
    return create_app(engine, tokenizer, template, ServeConfig(served_names=(MODEL,), eos_token_ids=EOS))


async def exchanges(app, engine, count, **fields):
    made = [Exchange(app, **fields) for _ in range(count)]
    await until(lambda: len(engine.sinks) == count)
    await asyncio.sleep(0.01)  # all wait for their first token
    return made


def words(tokenizer, count):
    return [tokenizer.token_bytes(WORDS[i % len(WORDS)]).decode() for i in range(count)]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_steps_tokens_are_written_before_the_step_returns(app, engine, tokenizer, path):
    streams = await exchanges(app, engine, 5, path=path)
    engine.step()  # a chat begins with its role
    before = [len(stream.sent) for stream in streams]
    for _ in range(3):
        engine.step()
    assert [len(s.sent) - n for s, n in zip(streams, before, strict=True)] == [3] * 5
    engine.step(last=True)
    for stream in streams:
        await stream.task
        said = [c["text"] if "text" in c else c["delta"].get("content", "") for c in stream.choices]
        assert [text for text in said if text] == words(tokenizer, 5)
        assert stream.choices[-1]["finish_reason"] == "length"


async def test_a_slow_reader_delays_nobody_and_gets_every_token_in_order(app, engine, tokenizer):
    slow, *quick = await exchanges(app, engine, 4)
    engine.step()
    slow.open.clear()
    seen = len(slow.sent)
    for _ in range(199):
        engine.step()
    assert [stream.text.count("data: ") for stream in quick] == [200] * 3
    assert len(slow.sent) == seen
    slow.open.set()
    await until(lambda: slow.text.count("data: ") == 200)
    late = [body.count(b"data: ") for body in slow.sent[seen:]]
    assert late[0] == 1  # it was begun when the reader stopped
    assert max(late) == MOST_AT_ONCE  # what had waited is written together, in bounded parts
    count = len(slow.sent)
    engine.step()
    assert len(slow.sent) == count + 1  # it keeps up again
    engine.step(last=True)
    for stream in (slow, *quick):
        await stream.task
        assert [c["text"] for c in stream.choices if c["text"]] == words(tokenizer, 202)


async def test_a_slow_reader_who_leaves_ends_only_its_own_request(app, engine, tokenizer):
    slow, other = await exchanges(app, engine, 2)
    slow.open.clear()
    for _ in range(5):
        engine.step()
    slow.gone.set()
    await slow.task
    assert len(engine.abandoned) == 1
    assert app.state.gate.inside == 1
    engine.step(last=True)
    await other.task
    assert [c["text"] for c in other.choices if c["text"]] == words(tokenizer, 6)
    assert slow.text == ""


async def test_a_request_whose_reader_is_stuck_is_aborted_at_its_limit(engine, tokenizer, template):
    config = ServeConfig(served_names=(MODEL,), eos_token_ids=EOS, request_limit_s=0.3)
    stuck = Exchange(create_app(engine, tokenizer, template, config), n=2)
    await until(lambda: len(engine.sinks) == 2)
    await asyncio.sleep(0.01)
    stuck.open.clear()
    engine.step()
    await until(lambda: len(engine.abandoned) == 2)
    assert not stuck.task.done()
    stuck.open.set()
    await stuck.task
    assert parse_events(stuck.text)[-1]["error"]["code"] == "timeout"


async def test_a_sequence_that_fails_at_once_keeps_the_others_of_its_request_from_starting(app, engine):
    followed = []

    def follow(request, sink):
        followed.append(request)
        sink(Output(request.request_id, finish=Finish(FinishReason.ERROR, 1, 0, 0, error="gone")))

    engine.follow = follow
    stream = Exchange(app, n=3)
    await stream.task
    assert len(followed) == 1
    assert parse_events(stream.text)[-1]["error"]["message"] == "gone"


async def test_a_client_that_leaves_in_the_middle_of_a_batch_gets_no_more_and_harms_nobody(app, engine, tokenizer):
    first, second, third = await exchanges(app, engine, 3)
    engine.step()
    first.on_send = second.gone.set  # seen while the step's tokens are being written
    engine.step()
    await second.task
    count = len(second.sent)
    engine.step()
    engine.step(last=True)
    for stream in (first, third):
        await stream.task
        assert [c["text"] for c in stream.choices if c["text"]] == words(tokenizer, 4)
    assert len(second.sent) == count
    assert len(engine.abandoned) == 1


async def test_a_fault_in_the_middle_of_a_batch_is_one_clients_error(app, engine, tokenizer, caplog):
    first, second, third = await exchanges(app, engine, 3)
    engine.step()

    def fail():
        second.on_send = lambda: None
        raise RuntimeError("boom")

    second.on_send = fail
    engine.step()
    await second.task
    assert parse_events(second.text)[-1]["error"]["type"] == "server_error"
    assert "boom" not in second.text
    engine.step(last=True)
    for stream in (first, third):
        await stream.task
        assert [c["text"] for c in stream.choices if c["text"]] == words(tokenizer, 3)


async def test_a_stop_string_ends_a_sequence_whose_reader_is_slow(app, engine, tokenizer):
    stopped = []
    engine.abort = stopped.append
    (slow,) = await exchanges(app, engine, 1, stop=words(tokenizer, 3)[-1])
    slow.open.clear()
    for _ in range(3):
        engine.step()
    assert len(stopped) == 1  # though nothing could be written yet
    engine.step(last=True)
    slow.open.set()
    await slow.task
    assert "".join(c["text"] for c in slow.choices) == "".join(words(tokenizer, 2))
    assert slow.choices[-1]["finish_reason"] == "stop"


async def test_a_real_reader_that_stops_reading_pauses_its_own_stream_only(live):
    server = await live()
    server.server.servers[0].sockets[0].setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, 8192
    )  # what it accepts has it too
    fields = {"model": MODEL, "prompt": [1000], "stream": True, "logprobs": 20, "max_tokens": 500, "ignore_eos": True}
    body = json.dumps(fields | {"n": 8}).encode()
    loop = asyncio.get_running_loop()
    small = socket.socket()
    small.setblocking(False)
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await loop.sock_connect(small, ("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    await loop.sock_sendall(small, head.encode() + b"\r\n\r\n" + body)
    connections = server.server.server_state.connections
    await until(lambda: any(c.flow.write_paused for c in connections))
    neighbour = await server.complete([1001], max_tokens=50, ignore_eos=True)
    assert neighbour["usage"]["completion_tokens"] == 50
    text = b""
    while not text.endswith(b"0\r\n\r\n"):
        text += await loop.sock_recv(small, 2**20)
    scores = re.findall(rb'"token_logprobs":\[([^\]]+)\]', text)
    assert sum(part.count(b",") + 1 for part in scores) == 8 * 500
    small.close()


async def test_begun_work_goes_on_as_if_it_had_been_awaited():
    async def at_once():
        return None

    assert begun(at_once()) is None

    seen, gate = [], asyncio.Event()

    async def later(fail):
        try:
            await gate.wait()
            await asyncio.sleep(0)
            seen.append("went on")
            if fail:
                raise ValueError("at the end")
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def rest_of(fail):
        rest = begun(later(fail))
        assert rest is not None
        await rest

    tasks = [asyncio.create_task(rest_of(fail)) for fail in (False, True, False)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.sleep(0)
    gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[1], ValueError)
    assert isinstance(results[2], asyncio.CancelledError)
    assert sorted(seen) == ["cancelled", "went on", "went on"]


async def test_begun_work_that_fails_at_once_says_so():
    async def fail():
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        begun(fail())


@given(st.text(), st.text())
def test_an_event_encoded_in_parts_is_the_event(model, text):
    event = {"model": model + '"text":""', "choices": [{"index": 3, "text": "", "logprobs": None}], "usage": None}
    encoded = TextEvent(event, "text").of(text, 5)
    counting = TextEvent(event, "text", 7)
    event["choices"][0]["text"] = text
    assert json.loads(encoded) == event
    assert b"\n" not in encoded
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    assert json.loads(counting.of(text, 5)) == json.loads(encoded) | {"usage": usage}


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 5))))
def test_the_loops_histogram_says_what_prometheus_own_would(observed):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bounds = (0.002, 0.5, 1.0, 10.0)
    mine = LoopHistogram("x", "text", "m", bounds)
    ours.register(mine)
    other = Histogram("x", "text", ["model_name"], buckets=bounds, registry=theirs).labels("m")
    for value, times in observed:
        mine.observe(value, times)
        for _ in range(times):
            other.observe(value)

    def samples(registry):
        (family,) = registry.collect()
        return {(s.name, *s.labels.items()): pytest.approx(s.value) for s in family.samples if s.name != "x_created"}

    assert samples(ours) == {key: value.expected for key, value in samples(theirs).items()}
