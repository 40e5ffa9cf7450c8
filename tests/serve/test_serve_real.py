"""The same cases on the real model, through a real server process started by `headrace serve`."""

import asyncio
import json
import os
import random
import time
from types import SimpleNamespace

import httpx
import jsonschema
import openai
import pytest
from serve_harness import parse_events
from server_process import MODEL, ServerProcess

from near_ties import assert_tie

pytestmark = [pytest.mark.model, pytest.mark.server]

BLOCK = 16
STORY = "Once upon a time, in a small village by the sea, there lived"
LONG = "The harbour master wrote in his log that the wind had turned. " * 40
USER = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The server that most tests share."""
    process = ServerProcess(
        tmp_path_factory.mktemp("server") / "log", "--max-model-len", "1024", "--kv-bytes", str(192 * 2**20)
    )
    yield process
    assert process.stop() == 0, process.log.read_text()


class Talk:
    def __init__(self, http):
        self.http = http

    async def complete(self, prompt, **fields):
        fields = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 24} | fields
        response = await self.http.post("/v1/completions", json=fields)
        assert response.status_code == 200, response.text
        return response.json()

    async def text(self, prompt, **fields):
        return (await self.complete(prompt, **fields))["choices"][0]["text"]

    async def events(self, prompt, **fields):
        fields = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 24, "stream": True} | fields
        response = await self.http.post("/v1/completions", json=fields)
        assert response.status_code == 200, response.text
        return parse_events(response.text)

    async def chat(self, messages, **fields):
        fields = {"model": MODEL, "messages": messages, "temperature": 0} | fields
        response = await self.http.post("/v1/chat/completions", json=fields)
        assert response.status_code == 200, response.text
        return response.json()

    async def tokens(self, text):
        return (await self.http.post("/tokenize", json={"prompt": text})).json()["tokens"]


@pytest.fixture
async def talk(server):
    async with server.client() as http:
        yield Talk(http)


def joined(events):
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def settled(server, condition):
    """Wait until the server's metrics meet a condition that must come true."""
    for _ in range(3000):
        metrics = server.metrics()
        if condition(metrics):
            return metrics
        await asyncio.sleep(0.02)
    raise AssertionError(f"this never came true: {metrics}")


async def idle(server):
    """All blocks are back and nothing runs."""
    return await settled(
        server,
        lambda m: m["num_requests_running"] == 0 and m["num_requests_waiting"] == 0 and m["kv_cache_usage_perc"] == 0,
    )


def same_greedy(left, right):
    """Two greedy answers (with logprobs 2) are equal, or part where the two best tokens are a near-tie in both."""
    a, b = left["logprobs"], right["logprobs"]
    for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=False)):
        if x != y:
            where = f"{os.environ['PYTEST_CURRENT_TEST'].split(' ')[0]}, after {''.join(a['tokens'][:i])[-40:]!r}"
            assert_tie(where, x, y, a["top_logprobs"][i], b["top_logprobs"][i])
            return
    assert left["text"] == right["text"]


async def test_B01_B04_stop_that_spans_tokens(talk):
    whole = await talk.complete(STORY, logprobs=0, max_tokens=40)
    tokens = whole["choices"][0]["logprobs"]["tokens"]
    text = whole["choices"][0]["text"]
    for start in (3, 9, 20):
        for stop in ("".join(tokens[start : start + 3]), "".join(tokens[start : start + 4])[1:-1]):
            expected = text[: text.index(stop)]
            plain = await talk.complete(STORY, stop=stop, max_tokens=40)
            events = await talk.events(STORY, stop=stop, max_tokens=40, stream_options={"include_usage": True})
            assert plain["choices"][0]["text"] == joined(events) == expected
            assert plain["choices"][0]["finish_reason"] == events[-2]["choices"][0]["finish_reason"] == "stop"
            assert plain["usage"]["completion_tokens"] == events[-1]["usage"]["completion_tokens"]


async def test_B02_chunks_are_their_tokens(talk):
    for event in await talk.events(STORY, logprobs=2, stop=["sea", "village", " the"], max_tokens=40):
        choice = event["choices"][0]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


DUCKS = {"structured_outputs": {"regex": "(🦆👩‍🚀漢é ){6}"}, "max_tokens": 200}


async def test_B10_B11_characters_over_tokens_alone_and_in_company(talk):
    alone = await talk.text("Emoji:", **DUCKS)
    assert alone == "🦆👩‍🚀漢é " * 6
    streams = await asyncio.gather(*(talk.events(f"Emoji {i}:", **DUCKS) for i in range(4)))
    assert [joined(events) for events in streams] == [alone] * 4


async def test_B13_B14_choices(talk):
    two = await talk.complete(STORY, n=2, temperature=1, seed=1)
    assert two["choices"][0]["text"] != two["choices"][1]["text"]
    for _ in range(50):
        body = await talk.complete(STORY, n=8, temperature=1, max_tokens=2)
        assert [c["index"] for c in body["choices"]] == list(range(8))


async def test_B16_prompt_list_with_n(talk):
    prompts = [STORY, "The capital of France is"]
    together = await talk.complete(prompts, n=2, logprobs=2)
    for i, prompt in enumerate(prompts):
        alone = await talk.complete(prompt, n=2, logprobs=2)
        for c in range(2):
            same_greedy(alone["choices"][c], together["choices"][2 * i + c])


async def test_B17_B71_warm_prefix_is_counted_and_not_computed_again(talk, server):
    prompt = [7000 + i for i in range(500)]
    cold = await talk.complete(prompt, max_tokens=1, explain=True)
    before = server.metrics()
    warm = await talk.complete(prompt, max_tokens=1, explain=True)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 499 // BLOCK * BLOCK <= cached <= 499
    assert warm["explain"]["prefix_hit_tokens"] == cached
    assert warm["explain"]["prefix_miss_tokens"] == 500 - cached
    assert warm["explain"]["prefill_steps"] <= cold["explain"]["prefill_steps"]
    after = await settled(server, lambda m: m["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] == cached)
    assert after["prefix_cache_queries_total"] - before["prefix_cache_queries_total"] == 500
    several = await talk.complete([[*prompt, k] for k in (5, 6, 7)], max_tokens=1)
    least = 500 // BLOCK * BLOCK
    assert 3 * least <= several["usage"]["prompt_tokens_details"]["cached_tokens"] <= 3 * 500
    streamed = await talk.events([[*prompt, k] for k in (8, 9)], max_tokens=1, stream_options={"include_usage": True})
    assert 2 * least <= streamed[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] <= 2 * 500


async def test_B22_logprobs_are_the_raw_models(talk):
    def first(body):
        logprobs = body["choices"][0]["logprobs"]
        return logprobs["top_logprobs"][0]

    cool = first(await talk.complete(STORY, logprobs=5, temperature=0.1, max_tokens=1, seed=1))
    warm = first(
        await talk.complete(STORY, logprobs=5, temperature=1.0, top_p=0.5, repetition_penalty=1.5, max_tokens=1, seed=1)
    )
    shared = cool.keys() & warm.keys()
    assert len(shared) >= 5
    assert all(abs(cool[token] - warm[token]) < 1e-4 for token in shared)


async def test_B20_B23_B29_echo_and_prompt_logprobs(talk):
    prompt = "\n1. Carol has 20"
    body = (await talk.complete(prompt, echo=True, logprobs=1, prompt_logprobs=0, max_tokens=6))["choices"][0]
    logprobs = body["logprobs"]
    count = len(await talk.tokens(prompt))
    assert "".join(logprobs["tokens"]) == body["text"]
    assert len(logprobs["tokens"]) == count + 6
    assert len(body["prompt_logprobs"]) == count
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    events = await talk.events(prompt, echo=True, logprobs=1, max_tokens=6)
    assert [x for e in events for x in e["choices"][0]["logprobs"]["text_offset"]] == logprobs["text_offset"]
    for streamed, whole in zip(
        [x for e in events for x in e["choices"][0]["logprobs"]["token_logprobs"]][1:],
        logprobs["token_logprobs"][1:],
        strict=True,
    ):
        assert abs(streamed - whole) < 1e-3
    generated = (await talk.complete(prompt, logprobs=1, max_tokens=6))["choices"][0]["logprobs"]
    assert generated["tokens"] == logprobs["tokens"][count:]


async def test_B28_byte_alternatives(talk):
    body = await talk.chat(USER, logprobs=True, top_logprobs=20, max_tokens=8)
    content = body["choices"][0]["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 20 for entry in content)
    assert bytes(b for e in content for b in e["bytes"]).decode() == body["choices"][0]["message"]["content"]
    for entry in content:
        values = [alternative["logprob"] for alternative in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)


async def test_B31_B32_usage_in_streams(talk):
    whole = await talk.complete(STORY, seed=3, temperature=0.8)
    events = await talk.events(STORY, seed=3, temperature=0.8, stream_options={"include_usage": True})
    assert joined(events) == whole["choices"][0]["text"]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


async def test_B40_logit_bias(talk):
    greedy = (await talk.complete(STORY, logprobs=2, max_tokens=8))["choices"][0]
    [banned] = await talk.tokens(greedy["logprobs"]["tokens"][0])
    without = (await talk.complete(STORY, logprobs=0, max_tokens=40, logit_bias={str(banned): -100}))["choices"][0]
    assert greedy["logprobs"]["tokens"][0] not in without["logprobs"]["tokens"]
    [wanted] = await talk.tokens(" duck")
    assert await talk.text(STORY, logit_bias={str(wanted): 100}, max_tokens=5) == " duck" * 5


async def test_B41_tiny_temperature_is_greedy(talk):
    greedy = (await talk.complete(STORY, logprobs=2))["choices"][0]
    same_greedy(greedy, (await talk.complete(STORY, logprobs=2, temperature=1e-5, top_p=1))["choices"][0])


@pytest.mark.parametrize("stream", [False, True])
async def test_B43_B44_B46_over_the_context(talk, stream):
    fields = {"model": MODEL, "prompt": [7000] * 1025, "stream": stream}
    response = await talk.http.post("/v1/completions", json=fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "1025" in error["message"]
    assert "1024" in error["message"]


async def test_B47_B52_a_prompt_near_the_limit(talk):
    events = await talk.events(
        [7000 + i for i in range(1020)], max_tokens=10240, stream_options={"include_usage": True}
    )
    assert events[-2]["choices"][0]["finish_reason"] in ("length", "stop")
    assert events[-1]["usage"]["completion_tokens"] <= 4


async def test_B08_B38_ids_out_of_range_harm_nobody(talk):
    for fields in (
        {"prompt": [49152]},
        {"prompt": [-1]},
        {"prompt": "p", "stop_token_ids": [10000000], "min_tokens": 1},
        {"prompt": "p", "logit_bias": {"49152": 1}},
    ):
        assert (await talk.http.post("/v1/completions", json={"model": MODEL, **fields})).status_code == 400
    assert await talk.text(STORY)


async def open_stream(server, **fields):
    body = json.dumps({"model": MODEL, "temperature": 0, "stream": True} | fields).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    return reader, writer


async def test_B55_twenty_clients_leave_in_mid_stream(talk, server):
    quiet = await talk.complete(STORY, logprobs=2, max_tokens=40)
    before = server.metrics()
    connections = [await open_stream(server, prompt=f"{i} {STORY}", max_tokens=900, ignore_eos=True) for i in range(20)]
    await settled(server, lambda m: m["num_requests_running"] >= 10)
    bystander = asyncio.create_task(talk.complete(STORY, logprobs=2, max_tokens=40))
    await asyncio.sleep(0.2)
    for _, writer in connections:
        writer.close()
    same_greedy(quiet["choices"][0], (await bystander)["choices"][0])
    after = await idle(server)
    assert after["request_success_total.abort"] - before["request_success_total.abort"] == 20


async def test_B56_non_stream_client_leaves(talk, server):
    before = server.metrics()["request_success_total.abort"]
    _, writer = await open_stream(server, prompt=STORY, max_tokens=900, ignore_eos=True, stream=False)
    await settled(server, lambda m: m["num_requests_running"] == 1)
    await asyncio.sleep(0.2)
    writer.close()
    after = await idle(server)
    assert after["request_success_total.abort"] == before + 1
    assert after["generation_tokens_total"] < 1e6


async def test_B61_aborts_near_the_end(talk, server):
    rng = random.Random(5)

    async def one(i):
        _, writer = await open_stream(server, prompt=[7000 + i % 3, 5, 6], max_tokens=1 + i % 3, ignore_eos=True)
        await asyncio.sleep(rng.random() * 0.25)
        writer.close()

    for _ in range(20):
        await asyncio.gather(*(one(i) for i in range(50)))
    await idle(server)
    assert await talk.text(STORY)


async def test_B62_an_aborted_prefill_leaves_nothing_wrong_behind(talk, server):
    prompt = "Z " + LONG
    await talk.http.post("/reset_prefix_cache")
    cold = await talk.complete(prompt, logprobs=2)
    for _ in range(3):
        await talk.http.post("/reset_prefix_cache")
        _, writer = await open_stream(server, prompt=prompt, max_tokens=50)
        await settled(server, lambda m: m["num_requests_running"] == 1)
        writer.close()
        await idle(server)
        same_greedy(cold["choices"][0], (await talk.complete(prompt, logprobs=2))["choices"][0])


@pytest.mark.parametrize("blocks", [1, 3])
async def test_B64_a_fully_cached_prompt_of_whole_blocks(talk, blocks):
    prompt = [9000 + i for i in range(blocks * BLOCK)]
    first = await talk.complete(prompt, logprobs=2)
    second = await talk.complete(prompt, logprobs=2)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] < len(prompt)
    same_greedy(first["choices"][0], second["choices"][0])


async def test_B67_flush_during_a_stream(talk):
    expected = await talk.complete(STORY, logprobs=2, max_tokens=60)
    running = asyncio.create_task(talk.complete(STORY, logprobs=2, max_tokens=60))
    for _ in range(5):
        assert (await talk.http.post("/reset_prefix_cache")).status_code == 200
        await asyncio.sleep(0.05)
    same_greedy(expected["choices"][0], (await running)["choices"][0])
    assert await talk.text(STORY)


async def test_B70_a_seed_does_not_depend_on_neighbours(talk):
    fields = {"temperature": 0.9, "seed": 77, "max_tokens": 20}
    alone = await talk.text(STORY, **fields)
    together = await asyncio.gather(
        talk.text(STORY, **fields),
        talk.text("Tell me more about", temperature=1, max_tokens=30),
        talk.text(STORY, temperature=1, max_tokens=30),
        talk.text(STORY, **fields),
    )
    assert together[0] == together[3] == alone


SCHEMA = {
    "type": "object",
    "properties": {
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["items"],
    "additionalProperties": False,
    "$defs": {
        "item": {
            "type": "object",
            "properties": {
                "name": {"enum": ["red", "green"]},
                "count": {"type": "integer", "maximum": 99, "minimum": 0},
            },
            "required": ["name", "count"],
            "additionalProperties": False,
        }
    },
}


async def test_B79_B80_structured_output(talk):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    for fields in ({}, {"min_tokens": 64}, {"temperature": 1, "n": 4, "seed": 5}):
        body = await talk.chat(USER, response_format=form, max_tokens=200, **fields)
        for choice in body["choices"]:
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
            assert choice["finish_reason"] == "stop"


HOSTILE = (
    {"prompt": [49152]},
    {"prompt": "x", "max_tokens": 0, "min_tokens": 5},
    {"prompt": "x", "repetition_penalty": 1e-300},
    {"prompt": "x", "temperature": 1e308},
    {"prompt": "x", "logit_bias": {"49152": 1}},
    {"prompt": "x", "structured_outputs": {"regex": "a{1000000}"}},
    {
        "prompt": "x",
        "structured_outputs": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(900)}}},
    },
    {"prompt": "x", "stop": [""] * 17},
    {"prompt": "word " * 2000, "stream": True},
)


async def test_a_good_stream_beside_two_bad_requests_at_a_time_is_the_same(talk):
    """On the native backend to the last bit of every log-probability; torch may round otherwise in another batch."""
    good = {"temperature": 0.7, "seed": 11, "max_tokens": 24, "ignore_eos": True, "logprobs": 3}

    async def choices():
        return [event["choices"] for event in await talk.events(STORY, **good) if event["choices"]]

    await choices()  # the prefix is warm from here on
    alone = await choices()
    ended = asyncio.Event()
    refused = 0

    async def hammer(first):
        nonlocal refused
        while not ended.is_set():
            for fields in HOSTILE[first::2]:
                response = await talk.http.post("/v1/completions", json={"model": MODEL} | fields)
                assert response.status_code == 400, (fields, response.text)
                refused += 1

    bad = [asyncio.create_task(hammer(i)) for i in range(2)]
    found = await choices()
    ended.set()
    await asyncio.gather(*bad)
    assert refused >= len(HOSTILE)
    if (await talk.http.get("/health")).json()["backend"] == "native":
        assert found == alone
    else:
        assert [c[0]["text"] for c in found] == [c[0]["text"] for c in alone]


async def test_B77_cycle_is_refused(talk):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
    response = await talk.http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": USER, "response_format": form}
    )
    assert response.status_code == 400


PAINT = {
    "type": "function",
    "function": {"name": "paint", "description": "Paint something", "parameters": SCHEMA},
}
NOW = {"type": "function", "function": {"name": "now", "description": "The time"}}


@pytest.mark.parametrize(
    ("tools", "choice"),
    [([NOW], "required"), ([PAINT], "required"), ([NOW, PAINT], {"type": "function", "function": {"name": "paint"}})],
)
async def test_B83_tool_calls(server, talk, tools, choice):
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    fields = {
        "model": MODEL,
        "messages": USER,
        "tools": tools,
        "tool_choice": choice,
        "temperature": 0,
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    whole = (await client.chat.completions.create(**fields)).choices[0]
    name, arguments = "", ""
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason
    [call] = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == (name, arguments)
    assert whole.finish_reason == reason == "tool_calls"
    wanted = {"now": {"type": "object", "maxProperties": 0}, "paint": SCHEMA}[name]
    jsonschema.validate(json.loads(arguments), wanted)
    await client.close()


async def test_explain_adds_up_on_the_real_engine(talk):
    began_s = time.monotonic()
    account = (await talk.complete(LONG, max_tokens=8, explain=True))["explain"]
    assert account["total_us"] <= (time.monotonic() - began_s) * 1e6  # it happened inside what the client saw
    assert min(account["parts_us"][part] for part in ("prefill", "decode")) > 0
    assert account["parts_us"]["preempted"] == account["preemptions"] == 0
    assert sum(account["parts_us"].values()) == account["total_us"]
    assert account["decode_steps"] == 7
    assert account["prefix_hit_tokens"] + account["prefix_miss_tokens"] == len(await talk.tokens(LONG))


async def test_B91_memory_does_not_grow_with_requests(talk, server):
    limit = asyncio.Semaphore(32)

    async def one(i):
        async with limit:
            await talk.complete([7000 + i % 40000, i % 1000], max_tokens=1)

    await asyncio.gather(*(one(i) for i in range(800)))
    warm = server.resident_bytes()
    await asyncio.gather(*(one(i) for i in range(800, 5800)))
    assert server.resident_bytes() - warm < 24 * 2**20
    await idle(server)


async def test_a_killed_engine_is_restarted_and_clients_get_an_error(talk, server):
    running = [
        asyncio.create_task(talk.http.post("/v1/completions", json=fields))
        for fields in (
            {"model": MODEL, "prompt": STORY, "max_tokens": 900, "ignore_eos": True, "stream": True},
            {"model": MODEL, "prompt": STORY, "max_tokens": 900, "ignore_eos": True},
        )
    ]
    await settled(server, lambda m: m["num_requests_running"] == 2)
    killed = server.engine_process()
    killed.kill()
    streamed, whole = await asyncio.gather(*running)
    assert streamed.status_code == 200
    assert "error" in parse_events(streamed.text)[-1]
    assert whole.status_code == 500
    assert whole.json()["error"]["type"] == "server_error"
    meanwhile = await talk.http.post("/v1/completions", json={"model": MODEL, "prompt": STORY, "max_tokens": 1})
    assert meanwhile.status_code in (200, 503)
    while not server.healthy():
        await asyncio.sleep(0.1)
    assert server.engine_process().pid != killed.pid
    assert await talk.text(STORY)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A server with room for little: 56 blocks (896 tokens) and 4 sequences at a time."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "own.jinja").write_text("<{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}>")
    process = ServerProcess(
        folder / "log",
        *("--max-model-len", "640", "--num-blocks", "56", "--max-num-seqs", "4", "--max-waiting", "100"),
        *("--chat-template", str(folder / "own.jinja")),
    )
    yield process
    if process.process.poll() is None:
        process.stop()


async def test_B65_preempted_requests_with_a_shared_prefix_finish_right(small, talk):
    # four at a time need more than there is: 380 shared tokens, and 100 + 40 of each one's own
    prompts = [LONG[:1800] + "".join(f" {i * k}" for k in range(10, 34)) for i in range(50)]
    fields = {"max_tokens": 40, "logprobs": 2, "ignore_eos": True, "explain": True}
    before = small.metrics()["num_preemptions_total"]
    async with small.client() as http:
        cramped = await asyncio.gather(*(Talk(http).complete(p, **fields) for p in prompts))
    preemptions = (await idle(small))["num_preemptions_total"] - before
    roomy = await asyncio.gather(*(talk.complete(p, **fields) for p in prompts))
    for left, right in zip(cramped, roomy, strict=True):
        same_greedy(left["choices"][0], right["choices"][0])
    assert all(body["usage"]["completion_tokens"] == 40 for body in cramped)
    accounts = [body["explain"] for body in cramped]
    assert sum(account["preemptions"] for account in accounts) == preemptions > 0
    for account in accounts:
        assert (account["parts_us"]["preempted"] > 0) == (account["preemptions"] > 0)
        assert sum(account["parts_us"].values()) == account["total_us"]


async def test_a_chat_template_from_a_file(small):
    async with small.client() as http:
        chat = (await http.post("/tokenize", json={"messages": USER})).json()["tokens"]
        plain = (await http.post("/tokenize", json={"prompt": "<user: Name three colours.;>"})).json()["tokens"]
        assert chat == plain
        answer = await Talk(http).chat(USER, max_tokens=4)
        assert answer["usage"]["prompt_tokens"] == len(plain)


async def test_B58_a_queued_request_of_a_dead_client_never_starts(small):
    busy = [await open_stream(small, prompt=[7000 + i], max_tokens=200, ignore_eos=True) for i in range(4)]
    await settled(small, lambda m: m["num_requests_running"] == 4)
    before = small.metrics()
    _, queued = await open_stream(small, prompt=LONG[:900], max_tokens=5)
    await settled(small, lambda m: m["num_requests_waiting"] == 1)
    queued.close()
    await settled(small, lambda m: m["num_requests_waiting"] == 0)
    for reader, _ in busy:
        await reader.readuntil(b"[DONE]")
    after = await idle(small)
    # a prompt that was never scheduled was never looked up either
    assert after["prefix_cache_queries_total"] == before["prefix_cache_queries_total"]
    for _, writer in busy:
        writer.close()


async def test_B92_sigterm_during_a_stream(small):
    reader, _writer = await open_stream(small, prompt=[7000], max_tokens=120, ignore_eos=True)
    await reader.readuntil(b"data: ")
    small.process.terminate()
    answer = SimpleNamespace(status_code=200)
    async with small.client() as http:
        while answer.status_code != 503:
            answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "p", "max_tokens": 1})
    rest = (await reader.readuntil(b"[DONE]")).decode()
    assert '"finish_reason":"length"' in rest
    assert await asyncio.to_thread(small.process.wait) == 0
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{small.url}/health")
