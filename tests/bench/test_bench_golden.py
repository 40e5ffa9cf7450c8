"""The client against the golden server: counts, outcomes and order exact; every metric exact on the planned times."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import numpy as np
import pytest
from aiohttp.test_utils import TestServer

from headrace.bench.client import Client
from headrace.bench.endpoint import Endpoint, EndpointError, probe
from headrace.bench.golden import GoldenScript, GoldenServer
from headrace.bench.metrics import all_metrics, measure
from headrace.bench.prompts import common_words
from headrace.bench.records import Outcome, RequestRecord, ServerSample, TokenSource
from headrace.bench.slo import Slo
from headrace.bench.traffic import Call, Message
from headrace.bench.view import Price, RunView

FAST = GoldenScript(ttft_ms=2.0, itl_ms=0.5)


@asynccontextmanager
async def golden(script: GoldenScript) -> AsyncIterator[tuple[GoldenServer, str]]:
    server = GoldenServer(script)
    async with TestServer(server.app) as running:
        yield server, str(running.make_url("/")).rstrip("/")


async def ask(url: str, output: int = 12, *, call: Call | None = None, **endpoint: object) -> tuple[RequestRecord, str]:
    client = Client(replace(Endpoint(url, "golden", force_length=True), **endpoint), time.monotonic())  # type: ignore[arg-type]
    record = RequestRecord(index=0, intended_s=client.now())
    try:
        text = await client.send(call or Call("one two three", 7, output), record)
    finally:
        await client.close()
    return record, text


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize("per_chunk", [1, 3, 5])
@pytest.mark.parametrize("usage", ["final", "continuous"])
async def test_counts_are_those_of_the_server(kind: str, per_chunk: int, usage: str) -> None:
    async with golden(replace(FAST, tokens_per_chunk=per_chunk, usage=usage)) as (server, url):
        record, text = await ask(url, 12, kind=kind, chunk_usage=True)
        truth = server.truth[0]
    assert record.outcome is Outcome.OK
    assert record.output_tokens == 12 == sum(truth.event_tokens)
    assert text == " " + " ".join(common_words()[:12])
    assert record.prompt_tokens == truth.prompt_tokens == (7 if kind == "chat" else 3)
    assert record.response_id == truth.id
    assert sum(record.event_tokens) == pytest.approx(12)
    # Reads may join events that arrive together, but never lose or invent tokens or reorder time.
    assert record.event_s == sorted(record.event_s)
    if usage == "continuous":
        assert record.token_source is TokenSource.CHUNK_USAGE
        assert record.event_tokens == truth.event_tokens
    else:
        assert record.token_source is (TokenSource.ONE_PER_CHUNK if per_chunk == 1 else TokenSource.SPREAD)


async def test_stamps_follow_the_events_they_stand_for() -> None:
    async with golden(replace(FAST, ttft_ms=10.0, itl_ms=2.0)) as (server, url):
        origin_s = time.monotonic()
        client = Client(Endpoint(url, "golden", force_length=True), origin_s)
        record = RequestRecord(index=0, intended_s=client.now())
        await client.send(Call("a b", 6, 8), record)
        await client.close()
        truth = server.truth[0]
    assert record.intended_s <= record.sent_s <= truth.received_s - origin_s
    for seen_s, sent_s, planned_s in zip(record.event_s, truth.event_s, truth.planned_s, strict=True):
        assert planned_s <= sent_s <= seen_s + origin_s
    assert record.headers_s <= record.first_byte_s == pytest.approx(record.event_s[0], abs=1e-6)
    assert record.event_s[-1] <= record.end_s


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ({"http_error_every": 1}, Outcome.HTTP_ERROR),
        ({"error_every": 1}, Outcome.STREAM_ERROR),
        ({"disconnect_every": 1}, Outcome.CUT),
        ({"empty_every": 1}, Outcome.EMPTY),
        ({"short_every": 1}, Outcome.WRONG_LENGTH),
        ({"stall_every": 1, "stall_ms": 5.0}, Outcome.OK),
    ],
)
async def test_every_fault_has_its_outcome(fault: dict[str, float], outcome: Outcome) -> None:
    async with golden(replace(FAST, **fault)) as (_, url):  # type: ignore[arg-type]
        record, _ = await ask(url)
    assert record.outcome is outcome
    assert bool(record.error) == (outcome is not Outcome.OK)
    if outcome in (Outcome.STREAM_ERROR, Outcome.CUT):
        assert len(record.event_s) == 4, "the tokens before the fault are kept"


async def test_a_timeout_and_a_closed_port_are_outcomes() -> None:
    async with golden(replace(FAST, ttft_ms=60_000.0)) as (_, url):
        record, _ = await ask(url, timeout_s=0.2)
    assert record.outcome is Outcome.TIMEOUT
    record, _ = await ask(url)
    assert record.outcome is Outcome.REFUSED


async def test_a_short_answer_is_fine_where_length_is_natural() -> None:
    async with golden(replace(FAST, short_every=1)) as (_, url):
        record, _ = await ask(url, force_length=False)
    assert record.outcome is Outcome.OK
    assert record.output_tokens == 6


async def test_too_long_a_prompt_is_a_400_with_its_text() -> None:
    async with golden(replace(FAST, max_context=10)) as (_, url):
        record, _ = await ask(url, 12)
    assert (record.outcome, record.http_status) == (Outcome.HTTP_ERROR, 400)
    assert "context" in record.error


async def test_slots_queue_and_metrics_show_it() -> None:
    slow = replace(FAST, ttft_ms=700.0, slots=2)  # the page must be read while the first two are being answered
    async with golden(slow) as (server, url), aiohttp.ClientSession() as session:
        asks = [asyncio.create_task(ask(url, 4)) for _ in range(5)]
        while server.count < 5:
            await asyncio.sleep(0.001)
        async with session.get(url + "/metrics") as response:
            page = await response.text()
        records = [record for record, _ in await asyncio.gather(*asks)]
    assert 'vllm:num_requests_running{model_name="golden"} 2' in page
    assert 'vllm:num_requests_waiting{model_name="golden"} 3' in page
    assert all(record.outcome is Outcome.OK for record in records)


async def test_the_pretended_prefix_cache_counts_whole_blocks() -> None:
    words = " ".join(f"w{k}" for k in range(60))
    async with golden(replace(FAST, prefix_cache=True)) as (_, url):
        first, _ = await ask(url, 2, call=Call(words, 64, 2))
        again, _ = await ask(url, 2, call=Call(words, 64, 2))
        other, _ = await ask(url, 2, call=Call("x " + words, 65, 2))
    assert (first.cached_tokens, again.cached_tokens, other.cached_tokens) == (0, 63, 0)


async def test_per_request_override() -> None:
    async with golden(FAST) as (server, url):
        await ask(url, 6, headers=(("X-Golden", "tokens_per_chunk=2,ttft_ms=3"),))
        bad, _ = await ask(url, 6, headers=(("X-Golden", "colour=2"),))
    assert server.truth[0].event_tokens == [2, 2, 2]
    assert bad.http_status == 400


async def test_not_streamed_answers_too() -> None:
    async with golden(FAST) as (_, url), aiohttp.ClientSession() as session:
        body = {"model": "m", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 5}
        async with session.post(url + "/v1/chat/completions", json=body) as response:
            answer = await response.json()
        async with session.post(url + "/v1/chat/completions", data=b"{") as response:
            refused = response.status
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["message"]["content"] == " " + " ".join(common_words()[:5])
    assert refused == 400


async def test_probe_finds_abilities_and_template() -> None:
    async with golden(replace(FAST, max_context=4096)) as (_, url):
        found = await probe(Endpoint(url, "golden"))
        plain = await probe(Endpoint(url, "", kind="completions"), natural_length=True)
    assert found.endpoint.force_length
    assert found.endpoint.chunk_usage
    assert (found.writer.tokens_per_word, found.writer.template_tokens, found.writer.message_tokens) == (1.0, 4, 4)
    assert found.max_context == 4096
    assert not plain.endpoint.force_length
    assert plain.endpoint.model == "golden", "the first model it lists"
    assert plain.writer.template_tokens == 0


async def test_probe_of_something_else_says_what_it_got() -> None:
    async with golden(replace(FAST, http_error_every=1)) as (_, url):
        with pytest.raises(EndpointError, match="planned failure"):
            await probe(Endpoint(url, "golden"))


async def test_messages_reach_the_wire_in_order() -> None:
    async with golden(FAST) as (server, url):
        messages = (Message("system", "a b"), Message("user", "c"), Message("assistant", "d"), Message("user", "e f"))
        chat, _ = await ask(url, 2, call=Call(messages, 0, 2))
        text, _ = await ask(url, 2, call=Call(messages, 0, 2), kind="completions")
        ids, _ = await ask(url, 2, call=Call((5, 6, 7), 3, 2), kind="completions")
    assert [chat.prompt_tokens, text.prompt_tokens, ids.prompt_tokens] == [6 + 16, 6, 3]
    assert len(server.truth) == 3


def planned(index: int, *, start_s: float, late_s: float, script: GoldenScript, tokens: int) -> RequestRecord:
    """The record of a perfect client of a golden stream: every time is the planned one."""
    offsets = script.event_offsets_s(tokens)
    sent_s = start_s + late_s
    events = [sent_s + offset for offset, _ in offsets]
    return RequestRecord(
        index=index, intended_s=start_s, sent_s=sent_s, headers_s=events[0], first_byte_s=events[0], end_s=events[-1],
        event_s=events, event_tokens=[float(size) for _, size in offsets], token_source=TokenSource.CHUNK_USAGE,
        prompt_tokens=100, prompt_tokens_declared=100, shared_tokens_declared=40, output_tokens=tokens, cached_tokens=25,
        output_tokens_asked=tokens, http_status=200,
    )  # fmt: skip


@pytest.mark.parametrize("per_chunk", [1, 4])
def test_every_metric_is_exact_on_planned_times(per_chunk: int) -> None:
    script = GoldenScript(ttft_ms=50.0, itl_ms=5.0, tokens_per_chunk=per_chunk)
    late_s = [0.0, 0.02, 0.04, 0.0]
    records = [planned(k, start_s=float(k), late_s=late, script=script, tokens=32) for k, late in enumerate(late_s)]
    broken = planned(9, start_s=1.0, late_s=0.0, script=script, tokens=32)
    broken.outcome, broken.event_s = Outcome.STREAM_ERROR, [1.0001]
    samples = (
        ServerSample(at_s=0.0, running=1, waiting=0, kv_usage=0.2, prefix_queries=1000, prefix_hits=100, energy_j=50.0),
        ServerSample(
            at_s=1.0, running=3, waiting=2, kv_usage=0.6, prefix_queries=1400, prefix_hits=220, energy_j=178.0
        ),
    )
    view = RunView((*records, broken), samples, Slo.parse("ttft_p99<80ms,itl_p99<6ms"), Price(3.6))
    found = measure(view)

    ttft_ms = np.array([50.0, 70.0, 90.0, 50.0])
    assert found["ttft_s"]["mean"] == pytest.approx(ttft_ms.mean() / 1e3)
    assert found["ttft_s"]["p50"] == pytest.approx(0.060)
    assert found["ttft_s"]["p99"] == pytest.approx(np.quantile(ttft_ms, 0.99) / 1e3)
    assert found["ttft_s"]["count"] == 4, "the failed request is not averaged in"
    assert found["ttft_raw_s"]["mean"] == found["first_byte_s"]["mean"] == pytest.approx(0.050)
    assert found["send_lateness_s"]["max"] == pytest.approx(0.04)
    # Whatever the chunks, a token takes 5 ms; only the gap between chunks shows their size.
    for name in ("mean", "p50", "p99", "min", "max"):
        assert found["itl_s"][name] == pytest.approx(0.005)
    assert found["itl_s"]["count"] == 4 * (32 - per_chunk)
    assert found["tpot_s"]["mean"] == pytest.approx(0.005)
    assert found["chunk_gap_s"]["mean"] == pytest.approx(0.005 * per_chunk)
    last_ms = 50.0 + 5.0 * (32 - per_chunk)
    assert found["e2e_s"]["mean"] == pytest.approx((last_ms + 15.0) / 1e3)
    duration_s = 3.0 + last_ms / 1e3
    assert found["output_tokens_per_s"]["value"] == pytest.approx(4 * 32 / duration_s)
    assert found["input_tokens_per_s"]["value"] == pytest.approx(400 / duration_s)
    assert found["requests_per_s"]["value"] == pytest.approx(4 / duration_s)
    assert found["goodput_per_s"]["value"] == pytest.approx(3 / duration_s)
    assert found["prefix_hit"] == {"declared_share": 0.4, "share": 0.3, "hit_tokens": 120, "source": "server counters"}
    assert found["kv_use"] == {"mean": 0.4, "peak": 0.6, "samples": 2}
    assert found["queue_depth"]["waiting_mean"] == 1.0
    assert found["queue_depth"]["running_peak"] == 3
    assert found["usd_per_million_output_tokens"]["value"] == pytest.approx(3.6 / 3600 * 1e6 / (128 / duration_s))
    assert found["energy"]["joules_per_output_token"] == pytest.approx(128.0 / 128)


def test_prefix_hits_come_from_usage_without_counters() -> None:
    view = RunView(tuple(planned(k, start_s=float(k), late_s=0, script=GoldenScript(), tokens=4) for k in range(3)))
    assert measure(view)["prefix_hit"] == {"declared_share": 0.4, "share": 0.25, "hit_tokens": 75, "source": "usage"}


def test_a_run_without_answers_has_no_figures() -> None:
    assert set(measure(RunView(())).values()) == {None}


def test_every_metric_states_its_unit_and_direction() -> None:
    for metric in all_metrics():
        assert metric.what
        assert metric.unit
        assert metric.better in ("higher", "lower", "neither")


def test_the_truth_page_is_json() -> None:
    async def read() -> list[dict[str, object]]:
        async with golden(FAST) as (_, url), aiohttp.ClientSession() as session:
            await ask(url, 3)
            async with session.get(url + "/golden/truth") as response:
                return json.loads(await response.text())

    (entry,) = asyncio.run(read())
    assert entry["event_tokens"] == [1, 1, 1]
    assert len(entry["planned_s"]) == 3


async def test_a_connection_closed_while_idle_is_not_a_failure() -> None:
    answer = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"%x\r\n%s\r\n0\r\n\r\n"
    )
    events = b'data: {"id":"a","choices":[{"text":"hi","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the first request of each connection and drops the connection at the second."""
        nonlocal asked
        for turn in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            asked += 1
            if turn == 1:
                break
            writer.write(answer % (len(events), events))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        client = Client(Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m"), time.monotonic())
        records = [RequestRecord(index=k, intended_s=client.now()) for k in range(2)]
        for record in records:
            await client.send(Call("a", 1, 1), record)
        await client.close()
    assert asked == 3
    assert [record.outcome for record in records] == [Outcome.OK, Outcome.OK]
    assert [record.reconnected for record in records] == [False, True]
