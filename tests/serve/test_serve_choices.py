"""Several choices, several prompts, usage."""

import asyncio

import pytest
from serve_harness import MODEL


async def test_B13_choices_do_not_overwrite_each_other(served):
    body = await served.complete("p", n=2, temperature=1, max_tokens=8)
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert body["choices"][0]["text"] != body["choices"][1]["text"]


async def test_B14_always_n_choices(served):
    served.engine.per_output = 2
    bodies = await asyncio.gather(*(served.complete(f"p{i}", n=8, max_tokens=3) for i in range(50)))
    for body in bodies:
        assert [c["index"] for c in body["choices"]] == list(range(8))
        assert all(c["text"] for c in body["choices"])


async def test_B16_prompt_list_with_n_is_prompt_major(served):
    body = await served.complete(["first prompt", "second one"], n=2, max_tokens=4, seed=3)
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    for i, prompt in enumerate(["first prompt", "second one"]):
        alone = await served.complete(prompt, n=2, max_tokens=4, seed=3)
        assert [c["text"] for c in alone["choices"]] == [c["text"] for c in body["choices"][2 * i : 2 * i + 2]]


async def test_choices_stream_as_they_answer_whole(served):
    fields = {"prompt": ["first prompt", "a second"], "n": 3, "max_tokens": 5, "seed": 8}
    whole = await served.complete(**fields)
    events = await served.events("/v1/completions", **fields)
    texts = [""] * 6
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [c["text"] for c in whole["choices"]]
    assert sum(c["finish_reason"] is not None for e in events for c in e["choices"]) == 6


async def test_B17_cached_tokens_are_summed_over_prompts(serve):
    warm = [1000 + i for i in range(40)]
    prompts = [[*warm, 7], [*warm, 8], [*warm, 9]]

    async def usage(**fields):
        served = serve()
        await served.complete(warm, max_tokens=1)
        if fields:
            return (await served.events("/v1/completions", prompt=prompts, max_tokens=2, **fields))[-1]["usage"]
        return (await served.complete(prompts, max_tokens=2))["usage"]

    whole = await usage()
    assert whole["prompt_tokens_details"]["cached_tokens"] == 3 * 32
    assert whole["prompt_tokens"] == 3 * 41
    assert await usage(stream=True, stream_options={"include_usage": True}) == whole


async def test_usage_counts_each_prompt_once_whatever_n(served):
    usage = (await served.complete([1000, 1001, 1002], n=4, max_tokens=5))["usage"]
    assert usage == {
        "prompt_tokens": 3,
        "completion_tokens": 20,
        "total_tokens": 23,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_B31_usage_is_one_last_chunk(served, path):
    fields = {"prompt": "p"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "p"}]}
    events = await served.events(path, max_tokens=4, stream_options={"include_usage": True}, **fields)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert all(event["usage"] is None for event in events[:-1])
    plain = await served.events(path, max_tokens=4, **fields)
    assert all("usage" not in event for event in plain)
    assert plain[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("extra", [{}, {"stop": " zz"}, {"n": 3}, {"temperature": 0}])
async def test_B32_streamed_usage_equals_whole(served, extra):
    whole = await served.complete("a prompt", max_tokens=9, seed=5, **extra)
    events = await served.events(
        "/v1/completions", prompt="a prompt", max_tokens=9, seed=5, stream_options={"include_usage": True}, **extra
    )
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events[-1]["usage"][key] == whole["usage"][key]


async def test_B53_one_json_body_with_everything_honoured(served):
    response = await served.post("/v1/completions", model=MODEL, prompt="p", stream=False, max_tokens=1, n=2)
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert [c["finish_reason"] for c in body["choices"]] == ["length", "length"]
    assert body["usage"]["completion_tokens"] == 2
    served.engine.say("one two three")
    stopped = await served.chat("p", stream=False, n=2, stop="two", presence_penalty=0.5, frequency_penalty=-0.5)
    assert [(c["message"]["content"], c["finish_reason"]) for c in stopped["choices"]] == [("one ", "stop")] * 2
    sampling = served.engine.submitted[-1].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)


async def test_same_seed_same_choices_and_none_differs(served):
    first = await served.complete("p", n=2, seed=11, max_tokens=6)
    again = await served.complete("p", n=2, seed=11, max_tokens=6)
    assert [c["text"] for c in first["choices"]] == [c["text"] for c in again["choices"]]
    seeds = [r.sampling.seed for r in served.engine.submitted]
    assert seeds[:2] == seeds[2:]
    await served.complete("p", n=2, max_tokens=1)
    unseeded = [r.sampling.seed for r in served.engine.submitted[4:]]
    assert len({*unseeded, *seeds}) == 4


async def test_explain_adds_up_exactly_whole_and_streamed(served):
    whole = await served.complete("p", max_tokens=4, explain=True)
    events = await served.events("/v1/completions", prompt="p", max_tokens=4, explain=True)
    chat = await served.events(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "p"}],
        max_tokens=4,
        explain=True,
        stream_options={"include_usage": True},
    )
    assert [("explain" in e) for e in events] == [False] * (len(events) - 1) + [True]
    assert [("explain" in e) for e in chat] == [False] * (len(chat) - 1) + [True]
    for account in (whole["explain"], events[-1]["explain"], chat[-1]["explain"]):
        assert sum(account["parts_us"].values()) == account["total_us"]
        assert all(part >= 0 for part in account["parts_us"].values())
        assert account["prefix_hit_tokens"] + account["prefix_miss_tokens"] >= 1
        assert account["decode_steps"] == 3
    several = (await served.complete(["p", "q"], max_tokens=2, explain=True))["explain"]
    assert [sum(c["parts_us"].values()) == c["total_us"] for c in several["choices"]] == [True, True]
    assert "explain" not in await served.complete("p", max_tokens=1)
