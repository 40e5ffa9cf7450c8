"""Messages of a request as the chat template takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.base.errors import InvalidInput
from headrace.serve.protocol.chat import AssistantMessage, DeveloperMessage, Message, RefusalPart, TextPart, ToolMessage
from headrace.serve.tools import OPEN, ToolUse, written_out
from headrace.text.template import TEMPLATE_OWN, ChatTemplate


def render(
    template: ChatTemplate,
    messages: Sequence[Message],
    use: ToolUse | None,
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt's text. Tools go to a template that knows our call format, else they are written into the messages.

    `variables` are the request's own for the template. Raises `InvalidInput` with the template's own words for messages
    that it refuses. Takes a while for long conversations: call it off the event loop.
    """
    plain = [_plain(message) for message in messages]
    tools = None
    if knows_tools(template):
        tools = None if use is None else use.descriptions()
    else:
        plain = written_out(plain, use)
    if clash := TEMPLATE_OWN & (variables or {}).keys():
        raise InvalidInput(f"{min(clash)} cannot be set here", field="chat_template_kwargs")
    return template.render(plain, tools=tools, add_generation_prompt=add_generation_prompt, **(variables or {}))


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
            if message.reasoning_content is not None:
                plain["reasoning_content"] = message.reasoning_content
            if message.tool_calls:
                plain["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
        case ToolMessage():
            plain["tool_call_id"] = message.tool_call_id
    if name := getattr(message, "name", None):
        plain["name"] = name
    return plain


def _part(part: TextPart | RefusalPart) -> dict[str, str]:
    return {"type": "text", "text": part.refusal if isinstance(part, RefusalPart) else part.text}
