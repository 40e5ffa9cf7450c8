"""Log-probabilities, echo, and how they line up with the text."""

import pytest

CAROL = "\n1. Carol has 20"


@pytest.mark.parametrize("ids", [[1, 2, 3], [1000, 1001, 1002]])
async def test_B19_echo_of_ids_starts_with_the_decoded_prompt(served, ids):
    served.engine.say(" and more")
    decoded = (await served.post("/detokenize", tokens=ids)).json()["prompt"]
    body = await served.complete(ids, echo=True)
    assert body["choices"][0]["text"] == decoded + " and more"


@pytest.mark.parametrize("prompt", [CAROL, "👩‍🚀 went up", [500, 600, 700]])
async def test_B20_echoed_tokens_join_to_the_text(served, prompt):
    served.engine.say(" apples 🦆")
    choice = (await served.complete(prompt, echo=True, logprobs=1))["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value is not None for value in logprobs["token_logprobs"][1:])
    position = 0
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert offset == position
        position += len(token)
    if isinstance(prompt, str):
        assert choice["text"] == prompt + " apples 🦆"


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("per_output", [1, 3])
async def test_B23_streamed_offsets_equal_the_whole(served, echo, per_output):
    served.engine.say(" apples, pears 🦆 and plums")
    served.engine.per_output = per_output
    whole = (await served.complete(CAROL, echo=echo, logprobs=1))["choices"][0]["logprobs"]
    events = await served.events("/v1/completions", prompt=CAROL, echo=echo, logprobs=1)
    for key, expected in whole.items():
        assert [x for e in events for x in e["choices"][0]["logprobs"][key]] == expected


async def test_B25_chat_logprobs_without_alternatives(served):
    body = await served.chat("hi", logprobs=True, max_tokens=4)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert all(entry["top_logprobs"] == [] for entry in content)


async def test_B28_byte_tokens_among_alternatives(served):
    from openai.types.chat import ChatCompletion

    served.engine.say("🦆 duck")
    body = await served.chat("hi", logprobs=True, top_logprobs=20)
    ChatCompletion.model_validate(body)
    choice = body["choices"][0]
    content = choice["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 20 for entry in content)
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == choice["message"]["content"]
    partial = [entry for entry in content if entry["token"] == ""]
    assert partial
    assert all(entry["bytes"] for entry in partial)


async def test_byte_alternatives_in_completions_keep_their_own_names(served):
    served.engine.say("🦆")
    choice = (await served.complete("p", logprobs=5))["choices"][0]
    assert all(len(named) >= 5 for named in choice["logprobs"]["top_logprobs"])


async def test_B29_one_entry_per_prompt_token(served):
    ids = served.tokenizer.encode(CAROL)
    choice = (await served.complete(CAROL, prompt_logprobs=1, max_tokens=2))["choices"][0]
    entries = choice["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == len(ids)
    assert all(str(i) in entry for i, entry in zip(ids[1:], entries[1:], strict=True))
    both = (await served.complete(CAROL, echo=True, logprobs=2, prompt_logprobs=1, max_tokens=2))["choices"][0]
    assert len(both["logprobs"]["tokens"]) == len(ids) + 2
    assert both["prompt_logprobs"] == entries
    assert all(len(named) == 2 for named in both["logprobs"]["top_logprobs"][1:])
    chat = await served.chat("hello", prompt_logprobs=0, max_tokens=2)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_scoring_a_prompt_without_generating(served):
    body = await served.complete(CAROL, echo=True, logprobs=0, max_tokens=0)
    assert body["choices"][0]["text"] == CAROL
    assert body["usage"]["completion_tokens"] == 0
    assert "".join(body["choices"][0]["logprobs"]["tokens"]) == CAROL


async def test_single_token_prompt_has_one_null_entry(served):
    choice = (await served.complete([1000], echo=True, logprobs=1, max_tokens=1))["choices"][0]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == 2


async def test_raw_logprobs_are_asked_for_whatever_the_sampling(served):
    await served.complete("p", logprobs=3, temperature=0.1, top_p=0.5, max_tokens=1)
    assert served.engine.submitted[-1].sampling.logprobs == 3
