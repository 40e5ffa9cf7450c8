"""Bad requests: a 400 that names the field, in OpenAI's shape, before anything reaches the engine."""

import json

import pytest
from serve_harness import MODEL

VOCAB = 49152
USER = [{"role": "user", "content": "hi"}]


async def untouched(served):
    """Nothing reached the engine, and the next normal request is answered."""
    assert served.engine.submitted == []
    await served.complete("fine", max_tokens=1)


@pytest.mark.parametrize("extra", [{}, {"min_tokens": 1}, {"stream": True}])
@pytest.mark.parametrize("ids", [[10000000], [VOCAB], [5, -1]])
async def test_B08_stop_token_ids_beyond_the_vocabulary(served, ids, extra):
    error = await served.refused(prompt="p", stop_token_ids=ids, **extra)
    assert error.param.startswith("stop_token_ids[")
    await untouched(served)


@pytest.mark.parametrize("prompt", [[-1], [3, -7], [[1], [-1]], [VOCAB], [[1], [2, VOCAB]]])
async def test_B37_prompt_ids_out_of_the_vocabulary(served, prompt):
    error = await served.refused(prompt=prompt)
    assert error.param.startswith("prompt[")
    await untouched(served)


@pytest.mark.parametrize("bad", [VOCAB, -1, 2**31, 2**70])
async def test_B38_ids_out_of_range_in_every_id_field(served, bad):
    for fields, param in [
        ({"prompt": [bad], "logprobs": 1}, "prompt"),
        ({"prompt": "p", "stop_token_ids": [bad], "logprobs": 1}, "stop_token_ids"),
        ({"prompt": "p", "logit_bias": {str(bad): 1.0}}, "logit_bias"),
        ({"prompt": "p", "token_ids_logprob": [bad]}, "token_ids_logprob"),
    ]:
        error = await served.refused(**fields)
        assert error.param.startswith(param)
    assert (await served.refused("/detokenize", tokens=[bad])).param == "tokens[0]"
    await untouched(served)


@pytest.mark.parametrize("key", ["x", "1.5", "", " 1", "1_0", "007", "1" * 6000, "²"])
async def test_logit_bias_keys_are_token_ids(served, key):
    assert (await served.refused(prompt="p", logit_bias={key: 1})).param.startswith("logit_bias")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("over", [1, 300])
async def test_B43_B44_B46_prompt_over_the_context(serve, stream, over):
    served = serve(max_model_len=64)
    length = 64 + over
    for path, fields in [
        ("/v1/completions", {"prompt": [1000] * length}),
        ("/v1/completions", {"prompt": [[1000], [1000] * length]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * length}]}),
    ]:
        response = await served.post(path, model=MODEL, stream=stream, max_tokens=5, **fields)
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["code"] == "context_length_exceeded"
        assert "64" in error["message"]
        if "completions" in path and "prompt" in fields:
            assert str(length) in error["message"]
        assert error["param"] in ("prompt", "prompt[1]", "messages")
    assert served.engine.submitted == []


async def test_a_prompt_that_fills_the_context_leaves_no_room(serve):
    served = serve(max_model_len=64)
    assert (await served.refused(prompt=[1000] * 64)).code == "context_length_exceeded"
    body = await served.complete([1000] * 63)
    assert body["usage"]["completion_tokens"] == 1


async def test_B47_max_tokens_is_clamped(serve):
    served = serve(max_model_len=64)
    body = await served.complete([1000] * 10, max_tokens=640)
    assert body["usage"]["completion_tokens"] == 54
    assert body["choices"][0]["finish_reason"] == "length"
    clamped = await served.complete([1000] * 60, max_tokens=640, min_tokens=600)
    assert clamped["usage"]["completion_tokens"] == 4


async def test_B49_defaults_without_max_tokens(serve):
    served = serve(max_model_len=128)
    chat = await served.chat("hello")
    assert chat["usage"]["total_tokens"] == 128
    assert (await served.complete("p"))["usage"]["completion_tokens"] == 16


async def test_B43_every_invalid_streaming_request_is_a_plain_400(served):
    for fields in ({"temperature": 3}, {"stop": ""}, {"unknown": 1}, {"logit_bias": {"x": 1}}, {"prompt": []}):
        error = await served.refused(**({"prompt": "p", "stream": True} | fields))
        assert error.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),  # no logit survives a division by it
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[0]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ""}, "prompt"),
        ({"n_probs": 5}, "n_probs"),
        ({"priority": "high"}, "priority"),
        ({"explain": 1}, "explain"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": {"type": "object"}}, "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_completion_fields(served, fields, param):
    error = await served.refused(**({"prompt": "p"} | fields))
    assert error.param == param
    assert param.split(".")[-1] in error.message
    await untouched(served)


TOOL = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"echo": True}, "echo"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "then"}}},
            "tool_choice.function.name",
        ),
    ],
)
async def test_chat_fields(served, fields, param):
    error = await served.refused("/v1/chat/completions", **({"messages": USER} | fields))
    assert error.param == param
    await untouched(served)


async def test_null_means_unset_for_every_optional_field(served):
    from headrace.serve.protocol.chat import ChatRequest
    from headrace.serve.protocol.completions import CompletionRequest

    nulls = {
        field.alias or name: None for name, field in CompletionRequest.model_fields.items() if not field.is_required()
    }
    await served.complete("p", **nulls, suffix=None)
    nulls = {field.alias or name: None for name, field in ChatRequest.model_fields.items() if not field.is_required()}
    await served.chat("p", **({**nulls, "max_tokens": 2}), functions=None, audio=None)


async def test_accepted_without_effect(served):
    extras = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    plain = await served.complete("p", seed=1)
    assert (await served.complete("p", seed=1, **extras))["choices"] == plain["choices"]


async def test_fields_beyond_openai_reach_the_engine(served):
    await served.complete(
        "p", top_k=7, min_p=0.1, repetition_penalty=1.2, ignore_eos=True, min_tokens=2, stop_token_ids=[9], priority=-3
    )
    request = served.engine.submitted[0]
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (7, 0.1, 1.2)
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.stop_token_ids) == (True, 2, (9,))
    assert request.priority == -3
    await served.complete("p", top_p=0, top_k=-1, logit_bias={"5": -100, "6": 2})
    sampling = served.engine.submitted[1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 1, 0)
    assert sampling.logit_bias == {5: -100, 6: 2}


async def test_generation_config_fills_what_a_request_leaves_unset(serve):
    from headrace.serve.config import SamplingDefaults

    defaults = SamplingDefaults.of({"temperature": 0.2, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1})
    served = serve(sampling_defaults=defaults)
    await served.complete("p")
    await served.complete("p", temperature=1, top_p=1, top_k=0, repetition_penalty=1)
    first, second = (request.sampling for request in served.engine.submitted)
    assert (first.temperature, first.top_p, first.top_k, first.repetition_penalty) == (0.2, 0.9, 50, 1.1)
    assert (second.temperature, second.top_p, second.top_k, second.repetition_penalty) == (1, 1, 0, 1)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": NaN}', b"[" * 3000])
async def test_bodies_that_are_no_json_object(served, body):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = await served.http.post(path, content=body)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_half_a_surrogate_pair_is_a_400(served):
    response = await served.http.post("/v1/completions", content=b'{"model": "tiny", "prompt": "a\\ud83d"}')
    assert response.status_code == 400


async def test_other_content_types_unknown_paths_and_methods(served):
    response = await served.http.post("/v1/completions", content=b"x=1", headers={"content-type": "text/plain"})
    assert response.status_code == 415
    for response, status in [
        (await served.http.get("/v1/nothing"), 404),
        (await served.http.get("/v1/completions"), 405),
        (await served.http.post("/v1/models", json={}), 405),
        (await served.http.get("/v1/models/other"), 404),
    ]:
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_an_unknown_path_is_told_what_is_served(served):
    """A client that asks for embeddings, or forgot `/v1`, learns the paths that exist; a wrong method the right one."""
    for path in ("/v1/embeddings", "/v1/responses", "/chat/completions"):
        response = await served.http.post(path, json={"model": MODEL, "input": "x"})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "not_found")
        assert path in error["message"]
        assert "POST /v1/chat/completions, " in error["message"]
        assert "GET /v1/models; GET /openapi.json has the rest" in error["message"]
    wrong = (await served.http.get("/v1/chat/completions")).json()["error"]
    assert wrong["message"] == "GET is not offered here; use POST."


async def test_unknown_model_is_404(served):
    error = await served.refused(status=404, model="gpt-5", prompt="p")
    assert (error.param, error.code) == ("model", "model_not_found")


async def test_B85_all_text_parts_are_in_the_prompt_in_order(served):
    parts = [{"type": "text", "text": "alpha one"}, {"type": "text", "text": "beta two"}]
    await served.chat([{"role": "user", "content": parts}], max_tokens=1)
    prompt = served.tokenizer.decode(served.engine.submitted[0].prompt_token_ids, skip_special=False)
    assert 0 < prompt.index("alpha one") < prompt.index("beta two")


STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("stream", [False, True])
async def test_B86_template_refusal_is_a_400_with_its_message(serve, stream):
    from headrace.text.template import ChatTemplate

    served = serve(template=ChatTemplate(STRICT))
    error = await served.refused("/v1/chat/completions", messages=USER * 2, stream=stream)
    assert "Roles must alternate user/assistant" in error.message
    assert error.param == "messages"
    await served.chat("fine", max_tokens=1)


async def test_a_model_without_template_says_so(serve):
    from headrace.text.template import ChatTemplate

    served = serve(template=ChatTemplate({}))
    assert "template" in (await served.refused("/v1/chat/completions", messages=USER)).message


async def test_request_body_is_limited_early(serve):
    served = serve(max_body_bytes=2000)
    error = await served.refused(status=413, prompt="x" * 3000)
    assert "2000" in error.message
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 500
            yield b"x" * 500

    response = await served.http.post("/v1/completions", content=endless())  # no content-length
    assert response.status_code == 413
    assert sent <= 3000
    assert json.loads(response.text)["error"]["code"] == "body_too_large"


async def test_too_many_sequences_in_one_request(serve):
    served = serve(max_sequences=4)
    assert (await served.refused(prompt="p", n=5)).param == "n"
    assert (await served.refused(prompt=["p"] * 3, n=2)).param == "prompt"
