"""Structured output: which grammar, if any, the whole answer follows."""

from __future__ import annotations

import json

from headrace.serve.errors import bad_field
from headrace.serve.protocol.chat import ChatRequest, JsonObjectFormat, JsonSchemaFormat, ResponseFormat
from headrace.serve.protocol.sampling import SamplingFields, StructuredOutputs
from headrace.serve.tools import ToolUse
from headrace.text.grammar import choice_grammar, laid_out, lark_grammar, regex_grammar, schema_grammar

_ANY_OBJECT = {"type": "object"}


def answer_grammar(request: SamplingFields, tools: ToolUse | None = None) -> str | None:
    """The grammar of the answer, None for free text. `ApiError` 400 or `InvalidInput` for a wrong or conflicting one.

    Compiling a large schema takes a while: call this off the event loop.
    """
    asked = request.response_format if isinstance(request, ChatRequest) else None
    grammar: str | None = None
    if request.structured_outputs is not None:
        if asked is not None or tools is not None:
            other = "response_format" if asked is not None else "tools"
            raise bad_field("structured_outputs", f"structured_outputs cannot be used together with {other}.")
        grammar = _own_grammar(request.structured_outputs)
    elif tools is not None:
        schema = _schema(asked)
        rule = None if schema is None else "%json " + json.dumps(laid_out(schema, "response_format.json_schema.schema"))
        grammar = tools.grammar(rule)
    elif (schema := _schema(asked)) is not None:
        grammar = schema_grammar(schema, "response_format.json_schema.schema")
    if grammar is not None and request.ignore_eos:
        raise bad_field(
            "ignore_eos", "ignore_eos cannot be used with structured output, whose form decides where an answer ends."
        )
    return grammar


def _schema(asked: ResponseFormat | None) -> dict[str, object] | None:
    match asked:
        case JsonSchemaFormat():
            return asked.json_schema.json_schema
        case JsonObjectFormat():
            return dict(_ANY_OBJECT)
        case _:
            return None


def _own_grammar(rules: StructuredOutputs) -> str:
    given = [name for name, value in rules if value is not None]
    if len(given) != 1:
        raise bad_field("structured_outputs", "structured_outputs needs exactly one of json, regex, choice, grammar.")
    if rules.json_schema is not None:
        return schema_grammar(rules.json_schema, "structured_outputs.json")
    if rules.regex is not None:
        return regex_grammar(rules.regex, "structured_outputs.regex")
    if rules.choice is not None:
        return choice_grammar(rules.choice, "structured_outputs.choice")
    assert rules.grammar is not None
    return lark_grammar(rules.grammar, "structured_outputs.grammar")
