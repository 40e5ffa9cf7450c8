"""The naive loop: with a cache and without it says the same, and its server speaks OpenAI's protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from starlette.testclient import TestClient

from headrace.control.request import Sampling
from headrace.engine import naive
from headrace.engine.naive import NaiveLoop, NaiveServer
from headrace.spec.config import EngineConfig
from headrace.spec.locate import ModelFiles, locate

pytestmark = pytest.mark.model
CONFIG = EngineConfig(model="smollm2-135m", backend="torch", max_model_len=256, threads=1)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return locate("smollm2-135m")


@pytest.fixture(scope="module")
def cached(files: ModelFiles) -> Iterator[NaiveLoop]:
    loop = naive.load(CONFIG, kv_cache=True, files=files)
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def uncached(files: ModelFiles) -> Iterator[NaiveLoop]:
    loop = naive.load(CONFIG, kv_cache=False, files=files)
    yield loop
    loop.close()


def ids(loop: NaiveLoop, prompt: tuple[int, ...], **sampling: object) -> list[int]:
    return [token for token, _ in loop.generate(prompt, Sampling(**({"temperature": 0.0} | sampling)))]  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 17, 40])
def test_a_cache_changes_nothing_but_the_time(cached: NaiveLoop, uncached: NaiveLoop, length: int) -> None:
    prompt = tuple(range(100, 100 + length))
    assert ids(cached, prompt, max_tokens=6, ignore_eos=True) == ids(uncached, prompt, max_tokens=6, ignore_eos=True)


def test_the_end_of_the_context_ends_the_answer(cached: NaiveLoop) -> None:
    found = list(cached.generate(tuple(range(100, 352)), Sampling(max_tokens=50, temperature=0.0, ignore_eos=True)))
    assert len(found) == 4
    assert [finish for _, finish in found] == ["", "", "", "length"]


def test_requests_leave_nothing_behind(cached: NaiveLoop) -> None:
    first = ids(cached, (5, 6, 7), max_tokens=5)
    ids(cached, (900, 901), max_tokens=3)
    assert ids(cached, (5, 6, 7), max_tokens=5) == first


def test_the_server_speaks_openai(cached: NaiveLoop, files: ModelFiles) -> None:
    body = {"model": "x", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    body |= {"max_tokens": 20, "temperature": 0}
    with TestClient(NaiveServer(cached, files, "x").app()) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 256
        whole = client.post("/v1/chat/completions", json=body).json()
        streamed = client.post(
            "/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
        )
        by_ids = client.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}).json()
        refused = [
            client.post("/v1/completions", json=bad).status_code
            for bad in ({}, {"prompt": []}, {"prompt": list(range(400))}, {"prompt": "x", "max_tokens": "many"})
        ]
    assert whole["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert whole["choices"][0]["finish_reason"] == "stop"
    events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    frames = [json.loads(event) for event in events[:-1]]
    text = "".join(choice["delta"]["content"] for frame in frames for choice in frame["choices"])
    assert text == "The capital of France is Paris."
    assert frames[-1]["usage"] == whole["usage"]
    assert by_ids["usage"]["completion_tokens"] == 3
    assert refused == [400, 400, 400, 400]
