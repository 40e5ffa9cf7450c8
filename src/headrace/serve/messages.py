"""Messages of a request as the chat template takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.serve.protocol.chat import AssistantMessage, DeveloperMessage, Message, RefusalPart, TextPart, ToolMessage
from headrace.serve.tools import OPEN, ToolUse, written_out
from headrace.text.template import ChatTemplate


def render(
    template: ChatTemplate, messages: Sequence[Message], use: ToolUse | None, *, add_generation_prompt: bool = True
) -> str:
    """The prompt's text. Tools go to a template that knows our call format, else they are written into the messages.

    Raises `InvalidInput` with the template's own words for messages that it refuses. Takes a while for long
    conversations: call it off the event loop.
    """
    plain = [_plain(message) for message in messages]
    if knows_tools(template):
        tools = None if use is None else use.descriptions()
        return template.render(plain, tools=tools, add_generation_prompt=add_generation_prompt)
    return template.render(written_out(plain, use), add_generation_prompt=add_generation_prompt)


def knows_tools(template: ChatTemplate) -> bool:
    """Whether a template writes tools in the format of `serve.tools`."""
    return any("tools" in source and OPEN in source for source in template.sources.values())


def _plain(message: Message) -> dict[str, Any]:
    given = message.content
    content = [_part(part) for part in given] if isinstance(given, list) else given
    role = "system" if isinstance(message, DeveloperMessage) else message.role
    plain: dict[str, Any] = {"role": role, "content": content}
    match message:
        case AssistantMessage():
            if message.content is None and message.refusal is not None:
                plain["content"] = message.refusal
            if message.tool_calls:
                plain["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        case ToolMessage():
            plain["tool_call_id"] = message.tool_call_id
    if name := getattr(message, "name", None):
        plain["name"] = name
    return plain


def _part(part: TextPart | RefusalPart) -> dict[str, str]:
    return {"type": "text", "text": part.refusal if isinstance(part, RefusalPart) else part.text}
