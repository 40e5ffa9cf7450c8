"""Chat templates: messages to the one text the model was trained on, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.errors import InvalidInput, UnsupportedModel
from headrace.text.tokenizer_folder import read_json

if TYPE_CHECKING:
    from headrace.text.sandbox import Program

TEMPLATE_OWN = frozenset({"self", "messages", "tools", "add_generation_prompt"})
"""Variables of a template that nobody else sets."""


class ChatTemplate:
    """A model's chat template (jinja2, from the checkpoint, so never trusted).

    `sources`: template texts by name; `default` is used, or `tool_use`, where there is one, when tools are given.
    `special_tokens`: texts that templates may write (`bos_token`, …). Rendering may be called from several threads.
    """

    def __init__(self, sources: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.special_tokens = dict(special_tokens or {})
        self._programs: dict[str, Program] = {}

    @classmethod
    def from_folder(cls, folder: str | Path, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
        """From `chat_template.jinja` (and `additional_chat_templates/*.jinja`), else `chat_template.json`, else
        `tokenizer_config.json`. A folder without one gives a template that refuses with a remedy."""
        folder = Path(folder)
        single, more = folder / "chat_template.jinja", folder / "additional_chat_templates"
        files = {"default": single} if single.is_file() else {}
        files |= {path.stem: path for path in sorted(more.glob("*.jinja"))}
        if files:
            return cls({name: path.read_text(encoding="utf-8") for name, path in files.items()}, special_tokens)
        for name in ("chat_template.json", "tokenizer_config.json"):
            found = read_json(folder / name).get("chat_template")
            if isinstance(found, list):  # a list of named templates
                return cls({entry["name"]: entry["template"] for entry in found}, special_tokens)
            if isinstance(found, str | dict):
                return cls(found, special_tokens)
        return cls({}, special_tokens)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
        """From `tokenizer.chat_template` and the named `tokenizer.chat_template.*` of a GGUF header."""
        key = "tokenizer.chat_template"
        named = {name.removeprefix(key + "."): text for name, text in metadata.items() if name.startswith(key + ".")}
        default = {"default": metadata[key]} if key in metadata else {}
        return cls(default | named, special_tokens)

    def __bool__(self) -> bool:
        """Whether there is any template."""
        return bool(self.sources)

    def compile(self) -> None:
        """Compile all templates now rather than with the first request. Raises `UnsupportedModel` for a broken one."""
        for name in self.sources:
            self._program(name)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text for `messages`; encode it with `add_special=False`, for the template writes all special tokens.

        Content given as a list of text parts is passed as such to a template that goes through parts, else joined with
        newlines. A content of null is empty text; a tool call's arguments given as JSON text become the object.
        `variables` go to the template as they are (`enable_thinking=False`).

        Raises `InvalidInput` (field `messages`) for messages that are malformed, hold parts other than text, or that
        the template refuses, with the template's own words; `UnsupportedModel` (field `chat_template`) when there is
        no template or it is broken, leaves the sandbox or goes over its bounds.
        """
        if clash := TEMPLATE_OWN & variables.keys():
            raise InvalidInput(f"{sorted(clash)[0]} cannot be set here", field="chat_template_kwargs")
        program = self._program(self._choose(tools))
        checked = [_checked(message, index, program.takes_parts) for index, message in enumerate(messages)]
        return program.render(
            {**self.special_tokens, "documents": None, **variables, "messages": checked}
            | {"tools": list(tools) if tools else None, "add_generation_prompt": add_generation_prompt}
        )

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if not self.sources:
            raise UnsupportedModel(
                "the model has no chat template",
                field="chat_template",
                remedy="use text completion, or give a template with --chat-template FILE",
            )
        if tools and "tool_use" in self.sources:
            return "tool_use"
        if "default" in self.sources:
            return "default"
        if len(self.sources) == 1:
            return next(iter(self.sources))
        raise UnsupportedModel(
            f"none of the model's chat templates ({', '.join(self.sources)}) is the default", field="chat_template"
        )

    def _program(self, name: str) -> Program:
        if name not in self._programs:
            from headrace.text.sandbox import Program  # jinja2 is loaded with the first template, not before

            self._programs[name] = Program(self.sources[name])
        return self._programs[name]


def _checked(message: Mapping[str, Any], index: int, takes_parts: str) -> dict[str, Any]:
    """A message as templates expect it; see `ChatTemplate.render`."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidInput("must be an object with role and content", field=where)
    if not isinstance(message.get("role"), str):
        raise InvalidInput("must be a string such as 'user'", field=f"{where}.role")
    result = dict(message)
    if "content" in message:
        result["content"] = _content(message["content"], f"{where}.content", takes_parts)
    if message.get("tool_calls"):
        result["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return result


def _content(content: Any, where: str, takes_parts: str) -> str | list[dict[str, Any]]:
    if content is None:
        content = ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if takes_parts == "only" else content
    if not isinstance(content, Sequence):
        raise InvalidInput("must be a string or a list of parts", field=where)
    texts = [_text(part, f"{where}[{position}]") for position, part in enumerate(content)]
    return "\n".join(texts) if takes_parts == "no" else [{"type": "text", "text": text} for text in texts]


def _text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text"):
        raise InvalidInput(f"parts of type {kind!r} are not supported", field=where, remedy="send parts of type 'text'")
    if not isinstance(part.get("text"), str):
        raise InvalidInput("must be a string", field=f"{where}.text")
    return str(part["text"])


def _tool_call(call: Any) -> Any:
    """Templates write a call's arguments with `tojson`, so JSON text would be quoted twice."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
