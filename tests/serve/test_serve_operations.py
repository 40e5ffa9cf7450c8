"""Models, tokens, health, metrics, keys, CORS, mounts, configuration."""

import asyncio
import os
import signal
import socket
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve_harness import MODEL
from starlette.responses import PlainTextResponse

from headrace.base.errors import InvalidInput
from headrace.serve.app import create_app
from headrace.serve.config import ServeConfig
from headrace.serve.explain import explain
from headrace.serve.keys import load_keys
from headrace.serve.server import run


async def metrics(served):
    """Every sample of /metrics without our prefix: name and labels but the model's → value."""
    text = (await served.http.get("/metrics")).text
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL
            assert sample.name.startswith("headrace:")
            samples[(sample.name.removeprefix("headrace:"), *labels.values())] = sample.value
    return samples


async def test_models(served):
    listed = await served.openai.models.list()
    assert [model.id for model in listed.data] == [MODEL]
    one = await served.openai.models.retrieve(MODEL)
    assert (one.owned_by, one.object) == ("headrace", "model")
    assert (await served.http.get("/v1/models")).json()["data"][0]["max_model_len"] == 512


async def test_several_names_for_one_model(serve, tokenizer, template):
    served = serve()
    app = create_app(served.engine, tokenizer, template, ServeConfig(served_names=("a", "org/b")))
    served.http._transport.app = app
    assert [m["id"] for m in (await served.http.get("/v1/models")).json()["data"]] == ["a", "org/b"]
    assert (await served.http.get("/v1/models/org/b")).json()["id"] == "org/b"
    for name in ("a", "org/b"):
        body = (await served.post("/v1/completions", model=name, prompt="p", max_tokens=1)).json()
        assert body["model"] == name


@pytest.mark.parametrize("text", ["Hello world", "👩‍🚀 漢字 é", "<|im_start|>user\nhi<|im_end|>", ""])
async def test_tokenize_and_back(served, text):
    body = (await served.post("/tokenize", model=MODEL, prompt=text)).json()
    assert body["tokens"] == served.tokenizer.encode(text)
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 512)
    assert (await served.post("/detokenize", tokens=body["tokens"])).json() == {"prompt": text}


async def test_tokenize_messages_is_what_chat_sends(served):
    messages = [{"role": "user", "content": "hi"}]
    await served.chat(messages, max_tokens=1)
    body = (await served.post("/tokenize", messages=messages)).json()
    assert tuple(body["tokens"]) == served.engine.submitted[0].prompt_token_ids
    shorter = (await served.post("/tokenize", messages=messages, add_generation_prompt=False)).json()
    assert len(shorter["tokens"]) < body["count"]
    for fields, param in [
        ({}, "prompt"),
        ({"prompt": "a", "messages": messages}, "prompt"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": messages, "add_special_tokens": True}, "add_special_tokens"),
    ]:
        assert (await served.refused("/tokenize", **fields)).param == param


async def test_health_reports_state_and_notes(served):
    body = (await served.http.get("/health")).json()
    assert body == {
        "status": "ok",
        "state": "ready",
        "model": "scripted",
        "backend": "scripted",
        "notes": ["this engine only repeats what it is told"],
    }
    served.engine.state = "dead"
    response = await served.http.get("/health")
    assert (response.status_code, response.json()["status"]) == (503, "unavailable")


async def test_tokens_are_counted_while_an_answer_is_written(served):
    served.engine.hold_after = 4
    answer = asyncio.create_task(served.complete("p", max_tokens=9))
    deadline = time.monotonic() + 30
    while (seen := await metrics(served))[("generation_tokens_total",)] < 4:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert seen[("generation_tokens_total",)] == 4
    assert seen[("prompt_tokens_total",)] == len(served.engine.submitted[0].prompt_token_ids)
    assert seen[("request_success_total", "length")] == 0
    served.engine.go.set()
    await answer
    assert (await metrics(served))[("generation_tokens_total",)] == 9


async def test_refusals_are_counted_by_status_and_code(serve):
    served = serve(api_keys=("k",), max_body_bytes=1000, max_waiting=0, max_num_seqs=1, max_sequences=1)
    known = {"Authorization": "Bearer k"}

    async def post(status, headers=known, path="/v1/completions", **fields):
        response = await served.http.post(path, json={"model": MODEL, "prompt": "p"} | fields, headers=headers)
        assert response.status_code == status

    await post(401, headers={})
    for _ in range(2):
        await post(400, temperature=9)
    await post(413, prompt="x" * 2000)
    await post(404, model="other")
    await post(400, n=2)
    await post(200)
    served.engine.hold_after = 1
    running = asyncio.create_task(post(200))
    await asyncio.sleep(0.05)
    await post(429)
    served.engine.go.set()
    await running
    text = (await served.http.get("/metrics")).text
    found = {
        (sample.labels["status"], sample.labels["code"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "headrace:requests_refused_total"
    }
    assert found == {
        ("401", "invalid_api_key"): 1,
        ("400", "invalid_value"): 3,
        ("413", "body_too_large"): 1,
        ("404", "model_not_found"): 1,
        ("429", "queue_full"): 1,
    }


@pytest.mark.parametrize("access_log", [False, True])
async def test_a_server_says_that_it_serves_once_it_listens_and_not_when_it_cannot(served, caplog, access_log):
    told = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def serve_it():
        return run(
            served.app,
            host="127.0.0.1",
            port=port,
            drain_s=0,
            stall_limit_s=9,
            access_log=access_log,
            listening=lambda: told.append(socket.create_connection(("127.0.0.1", port)).close()),
        )

    serving = asyncio.create_task(serve_it())
    deadline = time.monotonic() + 30
    while not told:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    async with httpx.AsyncClient() as client:
        await client.get(f"http://127.0.0.1:{port}/health?from=a-test")
    lines = {record.getMessage() for record in caplog.records if record.name == "uvicorn.access"}
    assert [("/health?from=a-test" in line, line.endswith(" 200")) for line in lines] == [(True, True)] * access_log
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(InvalidInput, match=str(port)):
            await serve_it()
    assert len(told) == 1


async def test_metrics_count_what_happened(served):
    warm = [1000 + i for i in range(40)]
    await served.complete([*warm, 1], max_tokens=5)
    await served.complete([*warm, 2], max_tokens=3)
    served.engine.say("one two")
    await served.chat("hi")
    served.engine.fail_at = 2
    await served.post("/v1/completions", model=MODEL, prompt=[1, 2, 3])
    seen = await metrics(served)
    prompt_tokens = sum(len(r.prompt_token_ids) for r in served.engine.submitted)
    assert seen[("prompt_tokens_total",)] == prompt_tokens == seen[("prefix_cache_queries_total",)]
    assert seen[("generation_tokens_total",)] == 5 + 3 + 3 + 2
    assert seen[("prefix_cache_hits_total",)] == 32
    assert {reason: seen[("request_success_total", reason)] for reason in ("stop", "length", "abort", "error")} == {
        "stop": 1,
        "length": 2,
        "abort": 0,
        "error": 1,
    }
    assert seen[("time_to_first_token_seconds_count",)] == 4
    assert seen[("inter_token_latency_seconds_count",)] == 4 + 2 + 2 + 1
    assert seen[("e2e_request_latency_seconds_count",)] == 4
    assert (seen[("num_requests_running",)], seen[("num_requests_waiting",)]) == (0, 0)
    assert seen[("kv_cache_usage_perc",)] == 0


async def test_gauges_show_running_and_waiting(serve):
    from serve_harness import until

    served = serve(max_num_seqs=1)
    served.engine.hold_after = 1
    running = [asyncio.create_task(served.complete("p q r", max_tokens=2)) for _ in range(3)]
    await until(lambda: len(served.engine.submitted) == 3 and served.engine.live)
    seen = await metrics(served)
    assert (seen[("num_requests_running",)], seen[("num_requests_waiting",)]) == (1, 2)
    assert 0 < seen[("kv_cache_usage_perc",)] < 1
    served.engine.go.set()
    await asyncio.gather(*running)


KEYED = ("/v1/models", "/v1/models/tiny", "/v1/completions", "/v1/chat/completions", "/tokenize", "/reset_prefix_cache")


async def test_api_keys(serve):
    served = serve(api_keys=("first", "second"))
    for path in KEYED:
        for header in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Bearer "},
            {"authorization": "Basic first"},
        ):
            method = "GET" if "models" in path else "POST"
            response = await served.http.request(method, path, headers=header)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/metrics", "/openapi.json"):
        assert (await served.http.get(path)).status_code == 200
    for key in ("first", "second"):
        response = await served.http.get("/v1/models", headers={"authorization": f"bearer {key}"})
        assert response.status_code == 200
    assert (await served.openai.models.list()).data
    assert served.engine.submitted == []


def test_keys_come_from_options_environment_and_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nfive\n\n six \n")
    assert load_keys(["one"], "two, three", file) == ("one", "two", "three", "five", "six")
    assert load_keys([], None, None) == ()
    assert load_keys(["one", "one"], None, None) == ("one",)
    file.write_text("# nothing\n")
    for arguments in ((["  "], None, None), ([], " , ", None), ([], None, file), ([], None, tmp_path / "missing")):
        with pytest.raises(InvalidInput):
            load_keys(*arguments)


async def test_cors(serve):
    served = serve(cors_origins=("https://page.example",), api_keys=("k",))
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    response = await served.http.options("/v1/chat/completions", headers=asked)
    assert response.headers["access-control-allow-origin"] == "https://page.example"
    refused = await served.http.post("/v1/completions", json={}, headers={"origin": "https://page.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example"
    other = await served.http.get("/health", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in (await serve().http.get("/health", headers=asked)).headers


async def test_mounted_pages_are_open_and_beside_the_api(serve, tokenizer, template):
    served = serve(api_keys=("k",))
    app = create_app(
        served.engine, tokenizer, template, served.config, mounts={"/plan": PlainTextResponse("the planner's page")}
    )
    served.http._transport.app = app
    assert (await served.http.get("/plan/")).text == "the planner's page"
    assert (await served.http.get("/plan", follow_redirects=True)).text == "the planner's page"
    assert (await served.http.get("/v1/models")).status_code == 401
    assert (await served.http.get("/planned")).status_code == 401


@pytest.mark.parametrize(
    "fields",
    [
        {"served_names": ()},
        {"served_names": ("",)},
        {"api_keys": ("",)},
        {"max_body_bytes": 0},
        {"max_waiting": -1},
        {"request_limit_s": 0},
        {"tokenizer_threads": 0},
    ],
)
def test_wrong_configuration_is_refused(fields):
    with pytest.raises(InvalidInput):
        ServeConfig(**({"served_names": ("m",)} | fields))


def test_explained_parts_add_up_whatever_the_clocks_say():
    import random

    from headrace.control.api import Timeline

    rng = random.Random(1)
    for _ in range(300):
        parts = [rng.choice([0.0, rng.random() * 10 ** rng.randint(-7, 2)]) for _ in range(4)]
        timeline = Timeline(*parts, sum(parts), 1, 2, 3, 4, 5)
        received = rng.random() * 1e6
        arrival = received + rng.random()
        finished = arrival + sum(parts) + rng.choice([-1e-7, 0.0, rng.random()])
        account = explain(received, arrival, timeline, finished)
        assert sum(account["parts_us"].values()) == account["total_us"]
        assert min(account["parts_us"].values()) >= 0
        assert abs(account["parts_us"]["queue"] - parts[0] * 1e6) <= 1.01
        assert account["parts_us"]["decode"] == pytest.approx(timeline.decode_s * 1e6, abs=1.01)


def test_the_server_loads_no_torch_and_no_engine():
    import subprocess
    import sys

    imports = "import sys, headrace.serve.app, headrace.serve.server; "
    report = "print([m for m in sys.modules if m == 'torch' or m.startswith('headrace.engine')])"
    ran = subprocess.run([sys.executable, "-c", imports + report], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
