"""OpenAI's own client, and every byte of an answer against the models of its package."""

import asyncio

import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from serve_harness import MODEL

USER = [{"role": "user", "content": "Tell me"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
OURS = {"prompt_logprobs", "explain", "max_model_len"}
"""What we send beyond OpenAI's fields."""


def checked(model, value, extra=()):
    """`value` as `model`, strictly: nothing missing, no type bent, no field that OpenAI does not know but those of `extra`."""
    found = model.model_validate(value, strict=False)
    assert found.model_dump(exclude_unset=True, by_alias=True, mode="json") == value
    unknown = set()

    def visit(node):
        if isinstance(node, BaseModel):
            unknown.update(node.model_extra or ())
            for field in type(node).model_fields:
                visit(getattr(node, field))
        elif isinstance(node, list):
            for item in node:
                visit(item)

    visit(found)
    assert unknown <= set(extra)
    return found


CHAT_CASES = [
    {},
    {"n": 3},
    {"logprobs": True, "top_logprobs": 5},
    {"logprobs": True},
    {"stop": ["the"], "max_tokens": 30},
    {"max_completion_tokens": 3},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "n": 2},
    {"response_format": {"type": "json_object"}},
    {"prompt_logprobs": 2, "explain": True},
]


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("fields", CHAT_CASES)
async def test_chat_answers_validate(served, fields, usage):
    fields = {"max_tokens": 60 if "tools" in fields else 8} | fields
    if "max_completion_tokens" in fields:
        del fields["max_tokens"]
    whole = checked(ChatCompletion, await served.chat(USER, seed=4, **fields), OURS)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    events = await served.events("/v1/chat/completions", messages=USER, seed=4, **fields, **options)
    chunks = [checked(ChatCompletionChunk, event, OURS) for event in events]
    texts = ["" for _ in whole.choices]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content or "" for choice in whole.choices]
    for index in range(len(whole.choices)):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert mine[0].delta.role == "assistant"
        assert [c.finish_reason is not None for c in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].finish_reason == whole.choices[index].finish_reason
        if fields.get("logprobs"):
            tokens = [entry for c in mine if c.logprobs for entry in c.logprobs.content]
            assert tokens == whole.choices[index].logprobs.content
    assert (chunks[-1].usage is not None) == usage


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 2, "prompt": ["a", "b"]}, {"logprobs": 3, "echo": True}, {"prompt_logprobs": 0, "explain": True}],
)
async def test_completion_answers_validate(served, fields):
    fields = {"prompt": "Once upon", "max_tokens": 6, "seed": 2} | fields
    body = await served.complete(**fields)
    whole = checked(Completion, {**body, "choices": [foreseen(c, fields) for c in body["choices"]]}, OURS)
    events = await served.events("/v1/completions", **fields)
    for event in events:
        for choice in event["choices"]:
            assert choice["index"] < len(whole.choices)
        checked(Completion, {**event, "choices": [foreseen(c, fields) for c in event["choices"]]}, OURS)


def foreseen(choice, fields):
    """A choice without the two nulls that OpenAI's API sends but its package's types leave out: the log-probability of
    an echoed prompt's first token, and the finish reason of a chunk that is not the last."""
    logprobs = choice["logprobs"]
    if fields.get("echo") and logprobs and logprobs["token_logprobs"][:1] == [None]:
        assert logprobs["top_logprobs"][0] is None
        first = {
            "token_logprobs": [0.0, *logprobs["token_logprobs"][1:]],
            "top_logprobs": [{}, *logprobs["top_logprobs"][1:]],
        }
        choice = {**choice, "logprobs": logprobs | first}
    return {**choice, "finish_reason": choice["finish_reason"] or "length"}


async def test_models_validate(served):
    checked(Model, (await served.http.get(f"/v1/models/{MODEL}")).json(), OURS)


async def test_async_client_streams(served):
    served.engine.say("Hello over there")
    stream = await served.openai.chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 4}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello over there"
    assert chunks[-1].usage.total_tokens > 0
    text = await served.openai.completions.create(model=MODEL, prompt=[1000, 1001], logprobs=2, echo=True)
    assert text.choices[0].logprobs.tokens


async def test_async_client_errors(served):
    with pytest.raises(openai.BadRequestError) as caught:
        await served.openai.completions.create(model=MODEL, prompt="p", temperature=9)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        await served.openai.completions.create(model="other", prompt="p")


async def test_sync_client(live):
    server = await live(api_keys=("secret",))
    server.engine.say("Hello over there")

    def work():
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
        whole = client.chat.completions.create(model=MODEL, messages=USER)
        stream = client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        completed = client.completions.create(model=MODEL, prompt="p", stream=True)
        texts = [chunk.choices[0].text for chunk in completed]
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        return whole.choices[0].message.content, "".join(pieces), "".join(texts)

    assert await asyncio.to_thread(work) == ("Hello over there",) * 3
