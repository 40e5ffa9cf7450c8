"""Structured output and tool calls."""

import itertools
import json
import random

import jsonschema
import numpy as np
import pytest
from serve_harness import MODEL

from headrace.serve.tools import Arguments, CallReader, CallStart, Content
from headrace.text.grammar import GrammarTokens, mask_words, schema_grammar, unpack_mask

USER = [{"role": "user", "content": "What time is it?"}]
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {
                    "type": "object",
                    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
                    "required": ["x", "y"],
                    "additionalProperties": False,
                },
                "how": {"enum": ["walk", "fly"]},
            },
            "required": ["to", "how"],
            "additionalProperties": False,
        },
    },
}
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CALL_MOVE = '<tool_call>\n{"name": "move", "arguments": {"to": {"x": 1, "y": -2}, "how": "fly"}}\n</tool_call>'


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


CYCLES = [
    {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"allOf": [{"$ref": "#"}, {"type": "object"}]},
    {"anyOf": [{"$ref": "#"}]},
]
RECURSIVE = [
    {"type": "object", "properties": {"next": {"$ref": "#"}}},
    {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
    {"type": "array", "items": {"$ref": "#"}},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("schema", CYCLES)
async def test_B77_cycles_without_base_case_are_refused_at_admission(served, schema, stream):
    error = await served.refused(
        "/v1/chat/completions", messages=USER, response_format=schema_format(schema), stream=stream
    )
    assert error.param == "response_format.json_schema.schema"
    assert served.engine.submitted == []


@pytest.mark.parametrize("schema", RECURSIVE)
async def test_recursion_with_a_base_case_works(served, schema):
    body = await served.chat("x", response_format=schema_format(schema), max_tokens=200)
    jsonschema.validate(json.loads(body["choices"][0]["message"]["content"]), schema)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema_format({"type": "hiccup"})}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"$ref": "http://elsewhere/x"})}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"$ref": "#/$defs/gone"})}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
        (
            {"structured_outputs": {"regex": "((a{100}){100}){100}"}},
            "structured_outputs.regex",
        ),  # valid, but too complex
        (
            {"structured_outputs": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(900)}}}},
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": {"type": "hiccup"}}}, "structured_outputs.json"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [NOW, {"type": "function", "function": {"name": "f", "parameters": CYCLES[2]}}]},
            "tools[1].function.parameters",
        ),
    ],
)
async def test_B76_bad_grammars_are_400_and_the_next_request_works(served, fields, param):
    error = await served.refused("/v1/chat/completions", messages=USER, **fields)
    assert error.param == param
    assert served.engine.submitted == []
    await served.chat("fine", max_tokens=1)


async def test_B79_parse_helper_with_nested_models(served):
    from pydantic import BaseModel

    class Step(BaseModel):
        title: str
        minutes: int

    class Recipe(BaseModel):
        name: str
        steps: list[Step]

    served.engine.say('{"name": "tea", "steps": [{"title": "boil", "minutes": 3}, {"title": "pour", "minutes": 1}]}')
    parsed = await served.openai.chat.completions.parse(model=MODEL, messages=USER, response_format=Recipe)
    assert parsed.choices[0].message.parsed == Recipe(
        name="tea", steps=[Step(title="boil", minutes=3), Step(title="pour", minutes=1)]
    )
    async with served.openai.chat.completions.stream(model=MODEL, messages=USER, response_format=Recipe) as stream:
        assert (await stream.get_final_completion()).choices[0].message.parsed == parsed.choices[0].message.parsed


@pytest.mark.parametrize("stream", [False, True])
async def test_B80_min_tokens_ends_with_the_grammar(served, stream):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    fields = {"messages": USER, "response_format": schema_format(schema), "min_tokens": 64}
    if stream:
        events = await served.events("/v1/chat/completions", **fields)
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
        reason = events[-1]["choices"][0]["finish_reason"]
    else:
        choice = (await served.chat(USER, response_format=fields["response_format"], min_tokens=64))["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    jsonschema.validate(json.loads(text), schema)
    assert reason == "stop"


async def test_min_tokens_holds_while_the_grammar_goes_on(served):
    body = await served.complete("p", structured_outputs={"regex": "[a-z]*"}, min_tokens=5, max_tokens=40)
    assert body["usage"]["completion_tokens"] >= 5
    assert (await served.complete("p", structured_outputs={"regex": "[a-z]*"}))["choices"][0]["text"] == ""


async def test_json_object_choice_regex_and_lark(served):
    served.engine.say('{"free": ["form", 1.5, null]}')
    body = await served.chat("x", response_format={"type": "json_object"})
    assert json.loads(body["choices"][0]["message"]["content"]) == {"free": ["form", 1.5, None]}
    served.engine.say("blue")
    for rule in ({"choice": ["red", "blue"]}, {"regex": "red|blue"}, {"grammar": 'start: "red" | "blue"'}):
        assert (await served.complete("p", structured_outputs=rule))["choices"][0]["text"] == "blue"


def whole(choice):
    message = choice["message"]
    return message["content"], [
        (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())
    ]


def joined(events):
    """Content and calls of a streamed answer; checks that ids and names come exactly once per call."""
    content, calls = "", []
    for delta in (e["choices"][0]["delta"] for e in events if e["choices"]):
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return content or None, [tuple(call) for call in calls]


@pytest.mark.parametrize("per_output", [1, 4])
@pytest.mark.parametrize(
    ("choice", "said", "content", "calls"),
    [
        ("auto", CALL_NOW, None, [("now", "{}")]),
        ("auto", "Let me see.\n" + CALL_MOVE, "Let me see.\n", [("move", '{"to": {"x": 1, "y": -2}, "how": "fly"}')]),
        (
            "auto",
            CALL_NOW + "\n" + CALL_MOVE,
            None,
            [("now", "{}"), ("move", '{"to": {"x": 1, "y": -2}, "how": "fly"}')],
        ),
        ("auto", "Noon, I <think>.", "Noon, I <think>.", []),
        ("none", "Noon.", "Noon.", []),
        ("required", CALL_MOVE, None, [("move", '{"to": {"x": 1, "y": -2}, "how": "fly"}')]),
        ("required", CALL_NOW, None, [("now", "{}")]),
        ({"type": "function", "function": {"name": "now"}}, "never mind", None, [("now", "{}")]),
    ],
)
async def test_B83_tool_calls_streamed_and_whole(served, choice, said, content, calls, per_output):
    served.engine.say(said)
    served.engine.per_output = per_output
    fields = {"tools": [NOW, MOVE], "tool_choice": choice}
    body = (await served.chat(USER, **fields))["choices"][0]
    events = await served.events("/v1/chat/completions", messages=USER, **fields)
    assert whole(body) == joined(events) == (content, calls)
    reason = "tool_calls" if calls else "stop"
    assert body["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == reason


async def test_parallel_calls_can_be_forbidden(served):
    served.engine.say(CALL_NOW + "\n" + CALL_NOW)
    body = await served.chat(USER, tools=[NOW], parallel_tool_calls=False)
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1


async def test_tools_beside_a_response_format(served):
    schema = {
        "type": "object",
        "properties": {"t": {"type": "integer"}},
        "required": ["t"],
        "additionalProperties": False,
    }
    served.engine.say('{"t": 12}')
    body = await served.chat(USER, tools=[NOW], response_format=schema_format(schema))
    assert json.loads(body["choices"][0]["message"]["content"]) == {"t": 12}
    served.engine.say(CALL_NOW)
    body = await served.chat(USER, tools=[NOW], response_format=schema_format(schema))
    assert body["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_call_cut_by_the_limit_ends_with_length(served):
    served.engine.say(CALL_MOVE)
    limit = len(served.tokenizer.encode(CALL_MOVE)) - 12
    body = (await served.chat(USER, tools=[NOW, MOVE], max_tokens=limit))["choices"][0]
    assert body["finish_reason"] == "length"
    [(name, arguments)] = whole(body)[1]
    assert name == "move"
    assert '{"to": {"x": 1, "y": -2}, "how": "fly"}'.startswith(arguments)


async def test_a_conversation_with_calls_and_answers_is_rendered(served):
    first = (await served.chat(USER, tools=[NOW], tool_choice="required", max_tokens=100))["choices"][0]["message"]
    history = [*USER, first, {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "12:00"}]
    await served.chat(history, tools=[NOW], max_tokens=1)
    prompt = served.tokenizer.decode(served.engine.submitted[-1].prompt_token_ids, skip_special=False)
    assert '"name": "now"' in prompt
    assert CALL_NOW in prompt
    assert "<tool_response>\n12:00\n</tool_response>" in prompt


async def test_a_template_that_knows_tools_gets_them(serve):
    from headrace.text.template import ChatTemplate

    source = "{% if tools %}[{{ tools | tojson }}]<tool_call>{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    served = serve(template=ChatTemplate(source))
    await served.chat(USER, tools=[NOW], max_tokens=1)
    prompt = served.tokenizer.decode(served.engine.submitted[-1].prompt_token_ids)
    assert prompt.startswith('[[{"')
    assert "system" not in prompt


@pytest.mark.parametrize(
    "text", [CALL_NOW, CALL_MOVE, "a\n" + CALL_MOVE + "\n" + CALL_NOW, "a <tool_cal", CALL_MOVE[:-16]]
)
def test_the_reader_says_the_same_however_text_is_cut(text):
    def read(cuts):
        reader, out = CallReader(), ["", []]
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        for event in [e for piece in pieces for e in reader.read(piece)] + reader.finish():
            match event:
                case Content(said):
                    out[0] += said
                case CallStart(_, _, name):
                    out[1].append([name, ""])
                case Arguments(index, said):
                    out[1][index][1] += said
        return out

    rng = random.Random(7)
    for _ in range(100):
        assert read(sorted(rng.sample(range(len(text)), rng.randint(0, 9)))) == read([])


def test_masks_follow_a_schema_to_its_end():
    """Random walks under the mask always end in an instance of the schema."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "s": {"enum": ["a", "é"]}, "l": {"type": "array", "maxItems": 2}},
        "required": ["n", "s"],
        "additionalProperties": False,
    }
    tokens = GrammarTokens([bytes([i]) for i in range(256)] + [b"<eos>"], [256], [256])
    row = np.zeros(mask_words(300), np.int32)
    rng = random.Random(3)
    for _ in range(30):
        matcher, out = tokens.matcher(schema_grammar(schema, "f")), b""
        while not matcher.ended and len(out) < 2000:
            matcher.fill(row)
            allowed = [i for i, ok in enumerate(unpack_mask(row, 300)) if ok]
            assert allowed
            assert max(allowed) <= 256
            ends = [i for i in allowed if i in (256, *b'"}],')]
            token = rng.choice(ends if ends and rng.random() < 0.7 else allowed)
            matcher.advance(token)
            out += bytes([token]) if token < 256 else b""
        if matcher.ended:
            jsonschema.validate(json.loads(out), schema)
