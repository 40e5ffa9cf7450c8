"""What clients send that were written for OpenAI's own server or for others: their loops go round here too."""

import gzip
import json

import pytest
from openai.types.chat import ChatCompletionMessage
from serve_harness import MODEL

from headrace.text.template import ChatTemplate

USER = [{"role": "user", "content": "Tell me"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
COUNTED = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"logprobs": 2}, {"stop": ["zzz"]}])
async def test_chunks_say_how_many_tokens_there_are_so_far(served, path, more):
    if "chat" in path:
        more = {"messages": USER} | ({"logprobs": True} if "logprobs" in more else more)
    else:
        more = {"prompt": "p"} | more
    events = await served.events(path, max_tokens=12, seed=3, stream_options=COUNTED, **more)
    *chunks, last = events
    assert last["choices"] == []
    total = last["usage"]
    n = more.get("n", 1)
    seen = {}
    for chunk in chunks:
        usage, (choice,) = chunk["usage"], chunk["choices"]
        before = seen.get(choice["index"], 0)
        assert usage["prompt_tokens"] == total["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["completion_tokens"] >= before
        if choice.get("text") or choice.get("delta", {}).get("content"):
            assert usage["completion_tokens"] > before
        seen[choice["index"]] = usage["completion_tokens"]
    assert len(seen) == n
    assert sum(seen.values()) == total["completion_tokens"]


async def test_counted_chunks_say_the_same_otherwise(served):
    plain = await served.events("/v1/completions", prompt="p", seed=3, stream_options={"include_usage": True})
    counted = await served.events("/v1/completions", prompt="p", seed=3, stream_options=COUNTED)
    assert plain[-1]["usage"] == counted[-1]["usage"]
    assert [c["choices"] for c in plain] == [c["choices"] for c in counted]
    assert [c["usage"] for c in plain[:-1]] == [None] * (len(plain) - 1)


async def test_counts_need_usage(served):
    options = {"continuous_usage_stats": True}
    error = await served.refused(prompt="p", stream=True, stream_options=options)
    assert error.param == "stream_options.continuous_usage_stats"


async def test_obfuscation_is_accepted_without_effect(served):
    await served.events("/v1/completions", prompt="p", stream_options={"include_obfuscation": False})


async def test_a_tool_loop_that_sends_back_dumped_messages_goes_round(serve):
    served = serve(template=ChatTemplate("{# tools <tool_call> #}{{ messages | tojson }}"))
    answer = await served.openai.chat.completions.create(
        model=MODEL, messages=USER, tools=[TOOL], tool_choice="required", max_tokens=60, seed=1
    )
    message = answer.choices[0].message
    assert message.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": "noon"} for call in message.tool_calls]
    for said in (message.model_dump(), message.model_dump(exclude_none=True), message):
        await served.openai.chat.completions.create(
            model=MODEL, messages=[*USER, said, *results], tools=[TOOL], max_tokens=3
        )
    deltas = [call.model_dump() | {"index": i} for i, call in enumerate(message.tool_calls)]
    named = [result | {"name": "now"} for result in results]
    for said in (message.model_dump(), {"role": "assistant", "content": None, "tool_calls": deltas}):
        await served.chat([*USER, said, *named], max_tokens=2)
    prompts = [served.tokenizer.decode(r.prompt_token_ids) for r in served.engine.submitted[1:]]
    assert prompts[0] == prompts[1] == prompts[2]
    assert prompts[3] == prompts[4]  # the index is in neither
    assert '"name": "now"}]' in prompts[3]
    plain = ChatCompletionMessage(role="assistant", content="hi", annotations=[]).model_dump()
    await served.chat([*USER, plain, *USER], max_tokens=2)


async def test_empty_lists_of_tools_and_calls_are_none(served):
    history = [*USER, {"role": "assistant", "content": "hi", "tool_calls": []}, *USER]
    plain = await served.chat(history, max_tokens=4, seed=1)
    other = await served.chat(history, max_tokens=4, seed=1, tools=[], tool_choice="auto")
    assert plain["choices"] == other["choices"]
    assert served.engine.submitted[-1].prompt_token_ids == served.engine.submitted[-2].prompt_token_ids


async def test_variables_reach_the_template(serve):
    source = "{{ 'quiet ' if enable_thinking is false }}{% for m in messages %}{{ m.content }}{% endfor %}"
    served = serve(template=ChatTemplate(source))
    await served.chat(USER, max_tokens=1)
    await served.chat(USER, max_tokens=1, chat_template_kwargs={"enable_thinking": False})
    plain, quiet = (served.tokenizer.decode(r.prompt_token_ids) for r in served.engine.submitted)
    assert (plain, quiet) == ("Tell me", "quiet Tell me")
    fields = {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}}
    counted = await served.post("/tokenize", **fields)
    assert served.tokenizer.decode(counted.json()["tokens"]) == quiet


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "self"])
async def test_variables_cannot_take_the_place_of_ours(served, name):
    error = await served.refused("/v1/chat/completions", messages=USER, chat_template_kwargs={name: 1})
    assert error.param == "chat_template_kwargs"
    assert name in error.message


async def test_the_stop_string_stays_when_asked(served):
    text = (await served.complete("p", max_tokens=30, seed=5))["choices"][0]["text"]
    stop = text[8:12]
    cut = (await served.complete("p", max_tokens=30, seed=5, stop=stop))["choices"][0]
    kept = (await served.complete("p", max_tokens=30, seed=5, stop=stop, include_stop_str_in_output=True))["choices"][0]
    assert (cut["finish_reason"], kept["finish_reason"]) == ("stop", "stop")
    assert kept["text"] == cut["text"] + stop


@pytest.mark.parametrize(("field", "remedy"), [("guided_json", "structured_outputs"), ("n_predict", "max_tokens")])
async def test_names_of_other_servers_are_told_ours(served, field, remedy):
    error = await served.refused(prompt="p", **{field: 1})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert remedy in error.message


@pytest.mark.parametrize("name", ["mood", "Mood", "a b", "list[str]"])
async def test_an_unknown_field_of_a_message_is_named(served, name):
    error = await served.refused("/v1/chat/completions", messages=[USER[0] | {name: 1}])
    assert error.param == f"messages[0].{name}"


async def test_unknown_fields_are_passed_over_where_the_server_was_told_so(serve, caplog):
    served = serve(ignore_unknown_fields=True)
    plain = await served.chat(USER, max_tokens=4, seed=1)
    for _ in range(2):
        extras = {"cache_prompt": True, "mirostat": {"tau": 1}, "stream_options": None}
        part = {"type": "text", "text": "Tell me", "cache_control": {"type": "ephemeral"}, "List[x]": 1}
        messages = [{"role": "user", "content": [part], "Mood": 1}]
        other = await served.chat(messages, max_tokens=4, seed=1, **extras)
        assert other["choices"] == plain["choices"]
    assert sum("mirostat" in record.message for record in caplog.records) == 1
    assert any("messages[0].content[0].cache_control" in record.message for record in caplog.records)
    wrong = await served.refused("/v1/chat/completions", messages=USER, temperature=9, cache_prompt=True)
    assert wrong.param == "temperature"
    functions = await served.refused("/v1/chat/completions", messages=USER, functions=[], cache_prompt=True)
    assert functions.param == "functions"  # what would change the answer is never passed over


@pytest.mark.parametrize("part", [{"type": "text", "text": "hi"}, {"type": "refusal", "refusal": "no"}])
async def test_a_part_of_an_answer_loses_its_unknown_field_alone(serve, part):
    def history(**more):
        return [*USER, {"role": "assistant", "content": [part | more]}, *USER]

    served = serve(ignore_unknown_fields=True)
    await served.chat(history(), max_tokens=1)
    await served.chat(history(cache_control=1), max_tokens=1)
    plain, other = served.engine.submitted
    assert plain.prompt_token_ids == other.prompt_token_ids
    error = await serve().refused("/v1/chat/completions", messages=history(cache_control=1))
    assert (error.param, error.code) == ("messages[1].content[0].cache_control", "unknown_parameter")
    wrong = await served.refused("/v1/chat/completions", messages=history(type="image_url"))
    assert "supported here: 'text', 'refusal'" in wrong.message


async def test_names_that_are_passed_over_cannot_forge_or_fill_a_log(serve, caplog):
    served = serve(ignore_unknown_fields=True)
    await served.complete("p", max_tokens=1, **{"x\nERROR forged": 1, "y" * 100_000: 2})
    told = [record.getMessage() for record in caplog.records if "ignored" in record.message]
    assert len(told) == 2
    assert all("\n" not in line and len(line) < 400 for line in told)


async def test_special_tokens_are_shown_when_asked(served):
    said = "word<|im_start|>word"
    served.engine.reply = lambda request: served.tokenizer.encode(said, add_special=False)
    hidden = (await served.complete("p"))["choices"][0]["text"]
    shown = (await served.complete("p", skip_special_tokens=False))["choices"][0]["text"]
    assert (hidden, shown) == ("wordword", said)


async def test_parts_that_are_no_text_are_told_what_is_taken(served):
    picture = {"type": "image_url", "image_url": {"url": "http://x"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, picture]}]
    error = await served.refused("/v1/chat/completions", messages=messages)
    assert error.message == "messages[0].content[1].type is 'image_url'; supported here: 'text'"


async def test_a_compressed_body_is_a_415(served):
    body = gzip.compress(json.dumps({"model": MODEL, "prompt": "p"}).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    response = await served.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 415
    assert "gzip" in response.json()["error"]["message"]
