"""Failures, disconnects, limits and the end of the server: every accepted request ends once, and alone."""

import asyncio
import json

import pytest
from serve_harness import MODEL, until

USER = [{"role": "user", "content": "hi"}]


def error_at_end(events):
    assert all("error" not in event for event in events[:-1])
    return events[-1]["error"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("fail_at", [0, 1, 3])
async def test_B50_a_failure_in_the_engine_is_one_error_event_then_the_end(served, path, fail_at):
    served.engine.fail_at = fail_at
    fields = {"prompt": "p"} if path == "/v1/completions" else {"messages": USER}
    error = error_at_end(await served.events(path, **fields))
    assert error["type"] == "server_error"
    assert "logits are not a number" in error["message"]
    response = await served.post(path, model=MODEL, **fields)
    assert response.status_code == 500
    assert response.json() == {"error": error}
    served.engine.fail_at = None
    assert (await served.post(path, model=MODEL, **fields)).status_code == 200


async def test_the_openai_client_raises_for_an_error_in_mid_stream(served):
    import openai

    served.engine.fail_at = 3
    stream = await served.openai.chat.completions.create(model=MODEL, messages=USER, stream=True)
    for _ in range(4):  # the role and three words
        assert (await anext(stream)).choices
    with pytest.raises(openai.APIError, match="logits are not a number"):
        await anext(stream)


async def test_one_failed_request_leaves_its_neighbours_alone(served):
    bad = served.tokenizer.encode("bad prompt")
    reply = served.engine.reply

    def fail_one(request):
        if list(request.prompt_token_ids) == bad:
            raise RuntimeError("boom")
        return reply(request)

    served.engine.reply = fail_one
    responses = await asyncio.gather(
        *(served.post("/v1/completions", model=MODEL, prompt=p, max_tokens=30) for p in ("bad prompt", *"abcdef"))
    )
    assert [r.status_code for r in responses] == [500] + [200] * 6
    assert "boom" not in responses[0].text
    assert served.engine.live == {}
    assert served.app.state.gate.inside == 0


async def test_a_failed_choice_ends_the_whole_request_and_its_siblings(served):
    served.engine.fail_at = 5
    response = await served.post("/v1/completions", model=MODEL, prompt=["a", "b"], n=3, max_tokens=50)
    assert response.status_code == 500
    await until(lambda: not served.engine.live)
    assert len(served.engine.finished) == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_killed_engine_ends_requests_with_an_error_and_serves_on_after_its_restart(served, stream):
    served.engine.hold_after = 2
    running = asyncio.create_task(served.post("/v1/completions", model=MODEL, prompt="p", stream=stream))
    await until(lambda: len(served.engine.live) == 1)
    served.engine.kill()
    response = await running
    if stream:
        assert "ended with code -9" in response.text
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.status_code == 500
    meanwhile = await served.post("/v1/completions", model=MODEL, prompt="p")
    assert meanwhile.status_code == 503
    assert int(meanwhile.headers["retry-after"]) >= 1
    health = await served.http.get("/health")
    assert (health.status_code, health.json()["state"]) == (503, "restarting")
    served.engine.revive()
    served.engine.hold_after = None
    await served.complete("p", max_tokens=2)
    assert (await served.http.get("/health")).status_code == 200


async def test_B52_a_request_that_takes_too_long_ends_with_an_error(serve):
    served = serve(request_limit_s=0.2)
    served.engine.hold_after = 1
    response = await served.post("/v1/completions", model=MODEL, prompt="p")
    assert response.status_code == 504
    error = error_at_end(await served.events("/v1/completions", prompt=[1000] * 500))
    assert error["code"] == "timeout"
    await until(lambda: not served.engine.live)


async def test_B55_disconnecting_clients_free_everything_and_disturb_nobody(live):
    server = await live()
    server.engine.hold_after = 4
    bystander = asyncio.create_task(server.post("/v1/completions", model=MODEL, prompt="q", max_tokens=9))
    connections = [await server.open("/v1/completions", prompt=f"p{i}", stream=True, max_tokens=400) for i in range(20)]
    await until(lambda: len(server.engine.live) == 21)
    for reader, _ in connections[:10]:
        await reader.readuntil(b"data: ")  # some have seen text already
    for _, writer in connections:
        writer.close()
    await until(lambda: len(server.engine.live) == 1)
    server.engine.go.set()
    assert (await bystander).json()["usage"]["completion_tokens"] == 9
    assert server.engine.stats.free_blocks == server.engine.stats.total_blocks
    await until(lambda: server.app.state.gate.inside == 0)
    metrics = (await server.http.get("/metrics")).text
    assert f'headrace:num_requests_running{{model_name="{MODEL}"}} 0.0' in metrics
    assert f'headrace:request_success_total{{finished_reason="abort",model_name="{MODEL}"}} 20.0' in metrics


@pytest.mark.parametrize("n", [1, 4])
async def test_B56_non_stream_request_stops_on_disconnect(live, n):
    server = await live()
    server.engine.hold_after = 2
    _, writer = await server.open("/v1/chat/completions", messages=USER, n=n)
    await until(lambda: len(server.engine.live) == n)
    writer.close()
    await until(lambda: not server.engine.live)
    assert [reason.value for reason in server.engine.finished.values()] == ["abort"] * n


async def test_B58_a_queued_request_of_a_dead_client_never_starts(live):
    server = await live(max_num_seqs=1)
    server.engine.hold_after = 2
    _, first = await server.open("/v1/completions", prompt="a", stream=True)
    await until(lambda: len(server.engine.started) == 1)
    _, second = await server.open("/v1/completions", prompt="b", stream=True)
    await until(lambda: len(server.engine.submitted) == 2)
    second.close()
    await until(lambda: server.app.state.gate.inside == 1)
    server.engine.go.set()
    await server.complete("c", max_tokens=1)
    first.close()
    await until(lambda: not server.engine.live)
    assert server.engine.submitted[1].request_id not in server.engine.started


async def test_B59_sockets_reset_in_mid_stream_leave_the_server_alive(live):
    import socket
    import struct

    server = await live()
    server.engine.hold_after = 3
    for _ in range(5):
        reader, writer = await server.open("/v1/completions", prompt="p", stream=True, max_tokens=300)
        await reader.readuntil(b"data: ")
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
        writer.transport.abort()
    server.engine.go.set()
    await until(lambda: not server.engine.live)
    await server.complete("still here", max_tokens=2)


async def test_B61_aborts_near_the_end(live):
    """Short requests, each dropped about when it ends; whatever comes first, everything is given back."""
    server = await live()

    async def one(i):
        _, writer = await server.open("/v1/completions", prompt=f"p{i}", stream=bool(i % 2), max_tokens=1 + i % 3)
        await asyncio.sleep((i * 7919 % 100) / 10000)
        writer.close()

    for start in range(0, 200, 20):
        await asyncio.gather(*(one(i) for i in range(start, start + 20)))
    await until(lambda: not server.engine.live and server.app.state.gate.inside == 0)
    await server.complete("fine", max_tokens=1)


async def test_B67_flush_during_a_stream(served):
    served.engine.hold_after = 2
    running = asyncio.create_task(served.events("/v1/completions", prompt="p", max_tokens=5))
    await until(lambda: served.engine.live)
    assert (await served.http.post("/reset_prefix_cache")).status_code == 200
    served.engine.go.set()
    assert (await running)[-1]["choices"][0]["finish_reason"] == "length"
    assert served.engine.flushes == 1


async def test_flush_reads_no_body(served):
    """Clients that send none announce bytes of an unknown kind all the same."""
    plain = {"content-type": "application/octet-stream"}
    assert (await served.http.post("/reset_prefix_cache", headers=plain)).status_code == 200
    assert (await served.http.post("/tokenize", headers=plain)).status_code == 415


async def test_queue_limit_is_429_with_retry_after(serve):
    served = serve(max_num_seqs=2, max_waiting=1)
    served.engine.hold_after = 1
    running = [asyncio.create_task(served.complete("p", max_tokens=3)) for _ in range(3)]
    await until(lambda: served.app.state.gate.inside == 3)
    response = await served.post("/v1/completions", model=MODEL, prompt="p", stream=True)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "queue_full"
    served.engine.go.set()
    await asyncio.gather(*running)
    await served.complete("p", max_tokens=1)


async def test_a_refused_request_gives_its_place_back(serve):
    served = serve(max_num_seqs=1, max_waiting=0, max_model_len=32)
    for _ in range(3):
        await served.refused(prompt=[1000] * 40)
        await served.refused(
            "/v1/chat/completions", messages=USER, response_format={"type": "json_object"}, ignore_eos=True
        )
    await served.complete("p", max_tokens=1)


async def test_draining_refuses_new_and_finishes_running_requests(served):
    served.engine.hold_after = 1
    running = asyncio.create_task(served.complete("p", max_tokens=3))
    await until(lambda: served.engine.live)
    gate = served.app.state.gate
    gate.draining = True
    for path in ("/v1/completions", "/v1/chat/completions"):
        fields = {"prompt": "p"} if path == "/v1/completions" else {"messages": USER}
        response = await served.post(path, model=MODEL, **fields)
        assert response.status_code == 503
        assert "retry-after" in response.headers
    assert (await served.http.get("/health")).status_code == 503
    served.engine.go.set()
    assert (await running)["usage"]["completion_tokens"] == 3
    assert gate.idle.is_set()


async def test_the_end_of_draining_ends_what_is_left_with_an_error(served):
    served.engine.hold_after = 1
    running = asyncio.create_task(served.events("/v1/completions", prompt="p", n=2))
    await until(lambda: len(served.engine.live) == 2)
    served.app.state.gate.cut()
    assert error_at_end(await running)["code"] == "draining"
    await until(lambda: not served.engine.live)


@pytest.mark.parametrize("finishes", [True, False])
async def test_B92_sigterm_drains_and_exits_with_0(tmp_path, finishes):
    """A server process over the scripted engine: the whole way from the signal to the exit code."""
    import signal
    import sys
    from pathlib import Path

    script = Path(__file__).with_name("scripted_server.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, *(("0.4", "60") if finishes else ("60", "4")), stdout=asyncio.subprocess.PIPE
    )
    port = int((await process.stdout.readline()).split()[-1])

    async def ask(path, **fields):
        body = json.dumps({"model": MODEL, **fields}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return reader, writer

    reader, _ = await ask("/v1/completions", prompt="p", stream=True, max_tokens=8)
    await reader.readuntil(b"data: ")
    process.send_signal(signal.SIGTERM)
    status = b""
    while b" 503 " not in status:  # the signal takes a moment to arrive
        answer, asking = await ask("/v1/completions", prompt="q", max_tokens=1)
        status = await answer.readline()
        asking.close()
        assert b" 200 " in status or b" 503 " in status
    rest = (await reader.read()).decode()
    assert rest.count("[DONE]") == 1
    assert ('"finish_reason":"length"' in rest) == finishes
    assert ('"error"' in rest) != finishes
    assert await process.wait() == 0


async def test_B89_health_answers_while_a_huge_prompt_is_tokenized(live):
    server = await live(max_body_bytes=40_000_000)
    started = asyncio.Event()
    loop = asyncio.get_running_loop()
    encode_batch = server.tokenizer.encode_batch

    class Watched:
        def __getattr__(self, name):
            return getattr(server.tokenizer, name)

        def encode_batch(self, texts):
            loop.call_soon_threadsafe(started.set)
            return encode_batch(texts)

    front = next(r.endpoint._answer._front for r in server.app.routes if r.path == "/v1/completions")
    object.__setattr__(front, "tokenizer", Watched())
    huge = asyncio.create_task(server.post("/v1/completions", model=MODEL, prompt="some words here " * 200_000))
    await started.wait()
    answered = 0
    while not huge.done():
        assert (await server.http.get("/health")).status_code == 200
        answered += 1
    assert answered >= 3
    assert (await huge).json()["error"]["code"] == "context_length_exceeded"


async def test_B89_an_oversize_body_is_refused_early(live):
    server = await live()
    response = await server.post("/v1/completions", model=MODEL, prompt="x" * 27_000_000)
    assert response.status_code == 413
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 27000000\r\n\r\n")
    assert b" 413 " in await reader.readline()  # before a byte of the body was sent
    writer.close()
