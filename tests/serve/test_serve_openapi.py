"""Our OpenAPI document: true to the routes, and to what schemathesis finds when it explores them."""

import re

import pytest
import schemathesis
from conftest import EOS, MODEL
from hypothesis import HealthCheck, Phase, settings
from scripted_engine import ScriptedEngine
from starlette.routing import Route

from headrace.serve.app import create_app
from headrace.serve.config import ServeConfig
from headrace.serve.openapi import decimals_below

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def api(tokenizer, template):
    config = ServeConfig(served_names=(MODEL,), eos_token_ids=EOS, max_sequences=256)
    engine = ScriptedEngine(tokenizer, max_num_seqs=64, max_model_len=4096)
    engine.per_output = 64
    app = create_app(engine, tokenizer, template, config)
    # a document with small numbers keeps examples small; everything else is as served
    return schemathesis.openapi.from_asgi("/openapi.json", app)


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
def test_schemathesis_finds_no_surprise(case):
    response = case.call()
    case.validate_response(response)


async def test_every_route_is_documented_and_every_path_routed(served):
    document = (await served.http.get("/openapi.json")).json()
    routed = {
        (re.sub(r"\{(\w+):path\}", r"{\1}", route.path), method.lower())
        for route in served.app.routes
        if isinstance(route, Route)
        for method in route.methods - {"HEAD"}
    }
    assert routed == {(path, method) for path, item in document["paths"].items() for method in item}


async def test_answers_fit_their_documented_shapes(served):
    from headrace.serve.protocol import responses

    tool = {"type": "function", "function": {"name": "now"}}
    for fields in ({}, {"logprobs": True, "top_logprobs": 2}, {"tools": [tool], "tool_choice": "required"}, {"n": 2}):
        fields = fields | {"max_tokens": 40, "explain": True, "prompt_logprobs": 1}
        responses.ChatCompletion.model_validate(await served.chat(USER, **fields))
        for event in await served.events("/v1/chat/completions", messages=USER, **fields):
            responses.ChatCompletionChunk.model_validate(event)
    for fields in ({}, {"logprobs": 2, "echo": True}, {"prompt_logprobs": 1, "explain": True}):
        responses.Completion.model_validate(await served.complete("p", **fields))
        for event in await served.events("/v1/completions", prompt="p", **fields):
            responses.Completion.model_validate(event)
    responses.Health.model_validate((await served.http.get("/health")).json())
    responses.ModelList.model_validate((await served.http.get("/v1/models")).json())


@pytest.mark.parametrize("limit", [2, 3, 10, 11, 99, 100, 101, 259, 1000, 49152])
def test_token_id_patterns_are_exact(limit):
    pattern = re.compile(f"^({'|'.join(decimals_below(limit))})$")
    assert all(bool(pattern.match(str(i))) == (i < limit) for i in range(2 * limit))
    assert not any(pattern.match(text) for text in ("", "00", "007", "-1", "1.0"))
