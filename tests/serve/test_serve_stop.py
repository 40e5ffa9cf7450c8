"""Stop strings, characters over several tokens, and streams that say what the whole answer says."""

import asyncio

import pytest
from serve_harness import MODEL

ANSWER = " It was a bright cold day in April, and the clocks were striking thirteen. Winston went on."


async def streamed(served, prompt="p", **fields):
    """Joined text, finish reason and events of a streamed completion."""
    events = await served.events("/v1/completions", prompt=prompt, max_tokens=60, **fields)
    choices = [choice for event in events for choice in event["choices"]]
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    return "".join(c["text"] for c in choices), choices[-1]["finish_reason"], choices


@pytest.mark.parametrize("per_output", [1, 3])
@pytest.mark.parametrize(
    "stop",
    [
        "cold day in April",
        [" the clocks"],
        "clo",
        "cks were str",
        ["thirteen", "zebra"],
        ANSWER[1:20],
        "n. W",
        "April, and t",
    ],
)
async def test_B01_B04_stop_is_cut_exactly_in_stream_and_whole_answer(served, stop, per_output):
    served.engine.say(ANSWER)
    served.engine.per_output = per_output
    stops = [stop] if isinstance(stop, str) else stop
    expected = ANSWER[: min(ANSWER.index(s) for s in stops if s in ANSWER)]
    whole = (await served.complete("p", max_tokens=60, stop=stop))["choices"][0]
    text, reason, _ = await streamed(served, stop=stop)
    assert (whole["text"], whole["finish_reason"]) == (expected, "stop")
    assert (text, reason) == (expected, "stop")


@pytest.mark.parametrize("stop", [None, "cold day in April", "cks were str", "April, and t"])
async def test_B02_each_chunk_is_its_own_tokens(served, stop):
    served.engine.say(ANSWER)
    text, _, choices = await streamed(served, logprobs=0, **({} if stop is None else {"stop": stop}))
    for choice in choices:
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    whole = await served.complete("p", max_tokens=60, logprobs=0, **({} if stop is None else {"stop": stop}))
    assert "".join(whole["choices"][0]["logprobs"]["tokens"]) == whole["choices"][0]["text"] == text


async def test_B02_chat_chunks_too(served):
    served.engine.say(ANSWER)
    messages = [{"role": "user", "content": "x"}]
    events = await served.events("/v1/chat/completions", messages=messages, stop="cks were str", logprobs=True)
    for choice in (event["choices"][0] for event in events):
        entries = (choice["logprobs"] or {"content": []})["content"]
        assert "".join(entry["token"] for entry in entries) == choice["delta"].get("content", "")


async def test_B05_the_earliest_match_wins(served):
    served.engine.say("xaab")
    whole = (await served.complete("p", stop=["aab", "ab"]))["choices"][0]
    text, reason, _ = await streamed(served, stop=["aab", "ab"])
    assert (whole["text"], whole["finish_reason"]) == (text, reason) == ("x", "stop")


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
async def test_B07_empty_stop_is_refused(served, stop):
    error = await served.refused(prompt="p", stop=stop)
    assert error.param.startswith("stop")
    assert served.engine.submitted == []


async def test_stop_string_ends_the_sequence_in_the_engine_with_exact_counts(served):
    served.engine.say(ANSWER)
    body = await served.complete("p", max_tokens=60, stop=" bright")
    kept = served.tokenizer.encode(" It was a bright")
    assert body["usage"]["completion_tokens"] == len(kept)
    assert [reason.value for reason in served.engine.finished.values()] == ["abort"]
    assert served.engine.live == {}
    events = await served.events(
        "/v1/completions", prompt="p", max_tokens=60, stop=" bright", stream_options={"include_usage": True}
    )
    assert events[-1]["usage"]["completion_tokens"] == len(kept)


async def test_stop_token_id_ends_without_being_shown(served):
    served.engine.say(" one two three")
    two = served.tokenizer.encode(" two")
    body = await served.complete("p", stop_token_ids=two, logprobs=0)
    assert body["choices"][0]["text"] == " one"
    assert body["choices"][0]["logprobs"]["tokens"] == [" one", ""]  # its entry, without text
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 2


EMOJI = " 👩‍🚀 and 🦆🦆 … 漢字 é"


async def test_B10_concurrent_emoji_streams_are_as_alone(served):
    served.engine.say(EMOJI)
    alone, _, _ = await streamed(served)
    both = await asyncio.gather(*(streamed(served, prompt=f"p{i}") for i in range(6)))
    assert alone == EMOJI
    assert [text for text, _, _ in both] == [EMOJI] * 6


@pytest.mark.parametrize("per_output", [1, 2, 5])
async def test_B11_characters_over_several_tokens_are_whole(served, per_output):
    served.engine.say(EMOJI)
    served.engine.per_output = per_output
    assert any(served.tokenizer.decode([i]) == "\ufffd" for i in served.tokenizer.encode(EMOJI))
    text, _, choices = await streamed(served)
    assert text == (await served.complete("p", max_tokens=60))["choices"][0]["text"] == EMOJI
    assert all("\ufffd" not in choice["text"] for choice in choices)


async def test_unfinished_character_at_the_limit_is_shown_as_replacement(served):
    served.engine.say("🦆")
    body = await served.complete("p", max_tokens=1)
    assert body["choices"][0]["text"] == "\ufffd"
    text, _, _ = await streamed(served)
    assert text == "🦆"


async def test_framing_ids_and_models_of_chunks(served):
    events = await served.events("/v1/completions", prompt="p", max_tokens=5)
    assert {(e["id"], e["object"], e["model"], e["created"]) for e in events} == {
        (events[0]["id"], "text_completion", MODEL, events[0]["created"])
    }
