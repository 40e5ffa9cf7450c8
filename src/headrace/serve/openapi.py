"""Our own OpenAPI document, made from the protocol's models and the facts of the running engine."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from headrace.control.api import EngineInfo
from headrace.serve.config import ServeConfig
from headrace.serve.protocol import responses
from headrace.serve.protocol.chat import ChatRequest
from headrace.serve.protocol.completions import CompletionRequest
from headrace.serve.protocol.strict import StrictModel
from headrace.serve.protocol.tokens import DetokenizeRequest, TokenizeMessages, TokenizeText

Requests = tuple[type[StrictModel], ...]

_POSTS: tuple[tuple[str, str, Requests, type[BaseModel], type[BaseModel] | None], ...] = (
    ("/v1/completions", "Continue prompts", (CompletionRequest,), responses.Completion, responses.Completion),
    (
        "/v1/chat/completions",
        "Answer a conversation",
        (ChatRequest,),
        responses.ChatCompletion,
        responses.ChatCompletionChunk,
    ),
    ("/tokenize", "Text or messages to token ids", (TokenizeText, TokenizeMessages), responses.Tokens, None),
    ("/detokenize", "Token ids to text", (DetokenizeRequest,), responses.Text, None),
    ("/reset_prefix_cache", "Forget all cached prefixes that no request holds", (), responses.Done, None),
)
_GETS: tuple[tuple[str, str, type[BaseModel] | None], ...] = (
    ("/v1/models", "The models served", responses.ModelList),
    ("/v1/models/{model}", "One model", responses.ModelCard),
    ("/tokenizer_info", "Special tokens and chat template", responses.TokenizerInfo),
    ("/health", "Whether requests are taken", responses.Health),
    ("/engine", "Facts of the running engine: sizes, memory predicted and real, counters", responses.Engine),
    ("/metrics", "Prometheus metrics", None),
    ("/openapi.json", "This document", None),
)
_ERRORS = {
    "400": "The request is wrong; `param` names the field",
    "401": "The API key is missing or unknown",
    "404": "There is no such model",
    "413": "The body is too large",
    "415": "The body is compressed or not JSON",
    "429": "The queue is full; see Retry-After",
    "500": "The engine failed on this request",
    "503": "No requests are taken now; see Retry-After",
    "504": "The request took longer than this server allows",
}


def openapi_document(info: EngineInfo, config: ServeConfig) -> dict[str, Any]:
    """OpenAPI 3.2 (the first that describes event streams) for this server: model names and the vocabulary's size are part of it."""
    shapes: list[type[BaseModel]] = [
        s for _, _, requests, *answers in _POSTS for s in (*requests, *answers) if s is not None
    ]
    shapes += [shape for _, _, shape in _GETS if shape is not None]
    shapes.append(responses.Error)
    _, definitions = models_json_schema(
        [(shape, "validation") for shape in dict.fromkeys(shapes)], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Any] = definitions["$defs"]
    _bind(schemas, info, config)
    if config.ignore_unknown_fields:
        for _, _, requests, *_ in _POSTS:
            for request in requests:
                _open(schemas, request)
    paths: dict[str, Any] = {}
    for path, summary, requests, answer, event in _POSTS:
        content: dict[str, Any] = {"application/json": _ref(answer)}
        if event is not None:
            content["text/event-stream"] = {"itemSchema": _event(event)}
        operation: dict[str, Any] = {"summary": summary, "responses": _responses(content, tuple(_ERRORS))}
        if requests:
            bodies = [_ref(request)["schema"] for request in requests]
            body = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        paths[path] = {"post": operation}
    for path, summary, shape in _GETS:
        kind = "text/plain" if path == "/metrics" else "application/json"
        content = {kind: _ref(shape) if shape is not None else {}}
        errors = (
            ("401", "404")
            if "{model}" in path
            else ("401",)
            if path.startswith(("/v1", "/engine", "/tokenizer"))
            else ()
        )
        operation = {"summary": summary, "responses": _responses(content, errors)}
        if path == "/health":
            operation["responses"]["503"] = {"description": "Not now", "content": content}
        if "{model}" in path:
            operation["parameters"] = [
                {"name": "model", "in": "path", "required": True, "schema": {"enum": list(config.served_names)}}
            ]
        paths[path] = {"get": operation}
    document: dict[str, Any] = {
        "openapi": "3.2.0",
        "info": {"title": "Headrace", "version": "1", "description": "OpenAI-compatible text generation."},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if config.api_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _ref(shape: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{shape.__name__}"}}


def _event(shape: type[BaseModel]) -> dict[str, Any]:
    """One server-sent event: JSON of `shape` or of an error, and `[DONE]` at the end."""
    content = {"anyOf": [_ref(shape)["schema"], _ref(responses.Error)["schema"]]}
    chunk = {"contentMediaType": "application/json", "contentSchema": content}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, chunk]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _responses(content: dict[str, Any], errors: tuple[str, ...]) -> dict[str, Any]:
    failed = {
        status: {"description": _ERRORS[status], "content": {"application/json": _ref(responses.Error)}}
        for status in errors
    }
    return {"200": {"description": "Success", "content": content}, **failed}


def _open(schemas: dict[str, Any], request: type[StrictModel]) -> None:
    """Let a request and all in it have fields that it does not know, but for those that are refused in any case."""
    seen: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("additionalProperties") is False:
                del node["additionalProperties"]
            name = str(node.get("$ref", "")).rpartition("/")[2]
            if name and name not in seen:
                seen.add(name)
                visit(schemas[name])
            for value in node.values():
                visit(value)
        elif isinstance(node, list):
            for value in node:
                visit(value)

    visit(schemas[request.__name__])
    for name, reason in request.UNSUPPORTED.items():
        schemas[request.__name__]["properties"][name] = {"type": "null", "description": f"Not supported: {reason}"}


def _bind(schemas: dict[str, Any], info: EngineInfo, config: ServeConfig) -> None:
    """Put what only the running server knows into the schemas: its model names and its vocabulary."""

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("type") == "integer" and node.get("description", "").startswith("A token id"):
                node["exclusiveMaximum"] = info.vocab_size
            for value in node.values():
                visit(value)
        elif isinstance(node, list):
            for value in node:
                visit(value)

    visit(schemas)
    for name in ("CompletionRequest", "ChatRequest", "TokenizeText", "TokenizeMessages", "DetokenizeRequest"):
        model = schemas[name]["properties"]["model"]
        for part in (model, *model.get("anyOf", ())):
            if part.get("type") == "string":
                part["enum"] = list(config.served_names)
    for name in ("CompletionRequest", "ChatRequest"):
        bias = schemas[name]["properties"]["logit_bias"]["anyOf"][0]
        bias["propertyNames"] = {"pattern": f"^({'|'.join(decimals_below(info.vocab_size))})$"}


def decimals_below(limit: int) -> list[str]:
    """Regular expressions that together match exactly the decimal spellings of 0 to `limit` - 1, for `limit` > 1."""
    digits = str(limit - 1)
    patterns = ["[0-9]"] if len(digits) > 1 else []
    patterns += [f"[1-9][0-9]{{{length - 1}}}" for length in range(2, len(digits))]
    for i, digit in enumerate(digits):
        low = 1 if i == 0 and len(digits) > 1 else 0
        high = int(digit) - 1
        if high >= low:
            patterns.append(
                f"{digits[:i]}[{low}-{high}]" + (f"[0-9]{{{len(digits) - i - 1}}}" if i < len(digits) - 1 else "")
            )
    return [*patterns, digits]
