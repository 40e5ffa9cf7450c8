"""Our OpenAPI document: true to the routes, and to what schemathesis finds when it explores them."""

import re

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from scripted_engine import ScriptedEngine
from serve_harness import EOS, MODEL
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
    return schemathesis.openapi.from_asgi("/openapi.json", app)


OPERATIONS = [
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/reset_prefix_cache", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/health", "GET"),
    ("/metrics", "GET"),
    ("/openapi.json", "GET"),
]


ONLY_AT_ADMISSION = {
    "best_of",  # equal to n
    "ignore_eos",  # not with a grammar
    "max_tokens",  # equal to max_completion_tokens
    "min_tokens",  # not above max_tokens
    "messages",  # fit the context
    "n",  # times prompts fit the server
    "parallel_tool_calls",  # needs tools
    "prompt",  # fits the context
    "response_format",  # holds a usable JSON schema
    "stream_options",  # needs stream
    "structured_outputs",  # holds exactly one usable grammar
    "tool_choice",  # names a tool
    "tools",  # hold usable JSON schemas under different names
    "top_logprobs",  # needs logprobs
}
"""Fields that a 400 may name although the body fits its JSON schema, which cannot say these things."""


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_schemathesis_finds_no_surprise(api, path, method, mode):
    """Valid data is accepted, invalid data refused, and every answer is as documented."""
    operation = api[path][method]
    accepted = 0

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    def explore(case):
        nonlocal accepted
        if mode is GenerationMode.POSITIVE:
            case.body = integers(case.body)
        response = case.call()
        accepted += response.status_code == 200
        if mode is GenerationMode.POSITIVE and response.status_code == 400:
            error = response.json()["error"]
            assert re.match(r"\w+", error["param"])[0] in ONLY_AT_ADMISSION, error
            assert error["code"] in ("invalid_value", "context_length_exceeded"), error
            case.validate_response(response, excluded_checks=[positive_data_acceptance])
        else:
            case.validate_response(response)

    if mode is GenerationMode.NEGATIVE and "{" not in path and (method == "GET" or path == "/reset_prefix_cache"):
        return  # a request without any input has no invalid form
    explore()
    assert accepted or mode is GenerationMode.NEGATIVE


def integers(value):
    """JSON Schema takes 3.0 for an integer; we want integers written as such."""
    match value:
        case dict():
            return {key: integers(item) for key, item in value.items()}
        case list():
            return [integers(item) for item in value]
        case float() if value.is_integer():
            return int(value)
    return value


async def test_every_route_is_documented_and_every_path_routed(served):
    document = (await served.http.get("/openapi.json")).json()
    routed = {
        (re.sub(r"\{(\w+):path\}", r"{\1}", route.path), method.lower())
        for route in served.app.routes
        if isinstance(route, Route)
        for method in route.methods - {"HEAD"}
    }
    assert routed == {(path, method) for path, item in document["paths"].items() for method in item}


async def test_unknown_fields_are_in_the_document_what_the_server_makes_of_them(serve):
    """Ignored at every depth where it was told so; answers stay as closed as they are, and what is refused stays refused."""
    from jsonschema import Draft202012Validator

    async def schemas(**config):
        served = serve(**config)
        return served, (await served.http.get("/openapi.json")).json()

    def accepts(document, name, body):
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        return Draft202012Validator(schema).is_valid(body)

    message = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
    bodies = [{"messages": USER, "cache_prompt": True}, {"messages": [message]}, {"messages": USER, "functions": []}]
    served, closed = await schemas()
    assert not any(accepts(closed, "ChatRequest", {"model": MODEL, **body}) for body in bodies)
    served, opened = await schemas(ignore_unknown_fields=True)
    assert [accepts(opened, "ChatRequest", {"model": MODEL, **body}) for body in bodies] == [True, True, False]
    for body in bodies:
        answer = await served.http.post("/v1/chat/completions", json={"model": MODEL, "max_tokens": 1, **body})
        assert (answer.status_code == 200) == accepts(opened, "ChatRequest", {"model": MODEL, **body})
    assert accepts(opened, "ChatRequest", {"model": MODEL, "messages": USER, "functions": None})
    answer = {"error": {"message": "m", "type": "t", "param": None, "code": None}}
    assert accepts(opened, "Error", answer)
    assert not accepts(opened, "Error", answer | {"more": 1})


def test_values_that_clients_wrote_are_not_kept():
    """The parser would hold up to 16,384 strings shorter than 64 bytes for as long as the server runs."""
    from headrace.serve.protocol.completions import CompletionRequest

    body = b'{"model": "m", "prompt": "a short prompt that nobody has sent before"}'
    first, second = (CompletionRequest.model_validate_json(body) for _ in range(2))
    assert first.prompt == second.prompt
    assert first.prompt is not second.prompt


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
