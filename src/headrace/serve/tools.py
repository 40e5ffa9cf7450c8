"""Tool calls: how functions are told to a model, what grammar its answer follows, and how calls are read back.

One format for every model, the widespread one: each call is

    <tool_call>
    {"name": "NAME", "arguments": {…}}
    </tool_call>

Templates that know this format get `tools` as they expect it. For all others the functions are described in the
system message, earlier calls are written into the assistant's text and tool answers become a user message in
`<tool_response>` tags. In both cases the sampler is bound to the format as soon as `<tool_call>` is written (from the
start for `required` and named choices), so arguments always follow the function's JSON schema.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.serve.errors import bad_field
from headrace.serve.protocol.chat import ChatRequest, NamedTool, Tool
from headrace.text.grammar import laid_out, lark_grammar

OPEN = "<tool_call>"
_HEAD = '\n{"name": "'
_MIDDLE = '", "arguments": '
_CLOSE = "}\n</tool_call>"
MAX_CALLS = 16
"""Most calls in one answer; keeps a small model from calling for ever."""

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request. `forced`: the answer is calls and nothing else."""

    offered: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    forced: bool
    max_calls: int

    def grammar(self, text_rule: str | None) -> str:
        """Grammar of the whole answer; `text_rule`: Lark for an answer without calls, None for any text."""
        calls = [
            f"call_{i}: {json.dumps(OPEN + _HEAD + tool.function.name + _MIDDLE)} "
            f"%json {json.dumps(_parameters(tool, i))} {json.dumps(_CLOSE)}"
            for i, tool in enumerate(self.callable)
        ]
        inner = [
            f"tail_{i}: {json.dumps(_HEAD + tool.function.name + _MIDDLE)} "
            f"%json {json.dumps(_parameters(tool, i))} {json.dumps(_CLOSE)}"
            for i, tool in enumerate(self.callable)
        ]
        call = " | ".join(f"call_{i}" for i in range(len(self.callable)))
        tail = " | ".join(f"tail_{i}" for i in range(len(self.callable)))
        more = "" if self.max_calls == 1 else f' ("\\n" ({call})){{0,{self.max_calls - 1}}}'
        if self.forced:
            rules = [f"start: ({call}){more}", *calls]
        elif text_rule is not None:
            rules = [f"start: plain | ({call}){more}", f"plain: {text_rule}", *calls]
        else:
            rules = [
                f"start: plain | lead ({tail}){more}",
                "plain: /(.|\\n)*/",
                f"lead[lazy]: /(.|\\n)*{OPEN}/",
                *inner,
                *([] if self.max_calls == 1 else calls),
            ]
        return lark_grammar("\n".join(rules), "tools")

    def instructions(self) -> str:
        """What a model without a native format is told in its system message."""
        listed = "\n".join(json.dumps(tool) for tool in self.descriptions())
        text = (
            "You can call functions. Each line here describes one of them in JSON:\n"
            f"<tools>\n{listed}\n</tools>\n"
            "A call is written like this, with the function's name and a JSON object of its arguments:\n"
            f'{OPEN}\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
        )
        if self.forced:
            names = " or ".join(tool.function.name for tool in self.callable)
            text += f"\nAnswer with a call of {names}."
        return text

    def descriptions(self) -> list[dict[str, Any]]:
        """The tools as templates expect them."""
        return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in self.offered]


def tool_use(request: ChatRequest) -> ToolUse | None:
    """What tools the answer may use; None when there are none or `tool_choice` is none. `ApiError` 400 on a conflict."""
    if not request.tools:
        if request.tool_choice not in (None, "none", "auto"):
            raise bad_field("tool_choice", "tool_choice needs tools.")
        if request.parallel_tool_calls is not None:
            raise bad_field("parallel_tool_calls", "parallel_tool_calls needs tools.")
        return None
    tools = tuple(request.tools)
    names = [tool.function.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise bad_field(f"tools[{i}].function.name", f"tools[{i}].function.name: {name!r} is given twice.")
    max_calls = 1 if request.parallel_tool_calls is False else MAX_CALLS
    match request.tool_choice:
        case "none":
            return None
        case None | "auto":
            return ToolUse(tools, tools, False, max_calls)
        case "required":
            return ToolUse(tools, tools, True, max_calls)
        case NamedTool(function=wanted):
            if wanted.name not in names:
                raise bad_field(
                    "tool_choice.function.name", f"tool_choice.function.name: there is no tool called {wanted.name!r}."
                )
            return ToolUse(tools, (tools[names.index(wanted.name)],), True, 1)


def _parameters(tool: Tool, index: int) -> dict[str, Any]:
    schema = tool.function.parameters
    field = f"tools[{index}].function.parameters"
    if not schema:
        return laid_out(_NO_ARGUMENTS, field)
    if schema.get("type", "object") != "object":
        raise bad_field(field, f"{field} must describe an object.")
    return laid_out({"type": "object", **schema}, field)


def written_out(messages: Sequence[Mapping[str, Any]], use: ToolUse | None) -> list[dict[str, Any]]:
    """Messages for a template without a tool format: everything about tools is put into plain contents."""
    out: list[dict[str, Any]] = []
    answering = False
    for message in messages:
        if message["role"] == "tool":
            answer = f"<tool_response>\n{_joined(message['content'])}\n</tool_response>"
            if answering:
                out[-1]["content"] += "\n" + answer
            else:
                out.append({"role": "user", "content": answer})
            answering = True
            continue
        answering = False
        plain = {k: v for k, v in message.items() if k != "tool_calls"}
        if calls := message.get("tool_calls"):
            said = _joined(message.get("content") or "")
            plain["content"] = "\n".join(([said] if said else []) + [_written_call(call["function"]) for call in calls])
        out.append(plain)
    if use is not None:
        if out and out[0]["role"] == "system":
            out[0]["content"] = f"{_joined(out[0]['content'])}\n\n{use.instructions()}".lstrip()
        else:
            out.insert(0, {"role": "system", "content": use.instructions()})
    return out


def _joined(content: Any) -> str:
    """A content as one text; parts are joined as the chat template joins them."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _written_call(function: Mapping[str, str]) -> str:
    return f"{OPEN}{_HEAD}{function['name']}{_MIDDLE}{function['arguments'] or '{}'}{_CLOSE}"


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the arguments of call `index`."""

    index: int
    text: str


ToolEvent = Content | CallStart | Arguments


class CallReader:
    """Splits an answer, piece by piece, into content and calls. The pieces of one kind joined give the whole."""

    def __init__(self) -> None:
        self._state: Literal["text", "head", "arguments", "between"] = "text"
        self._held = ""
        self._blank = True
        self._arguments = ""
        self.calls = 0

    def read(self, text: str) -> list[ToolEvent]:
        """What the answer's next piece says; text that may be the start of a mark is held back."""
        self._held += text
        events: list[ToolEvent] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[ToolEvent]:
        """What was held back, now that the answer has ended; an unfinished head of a call is dropped."""
        events: list[ToolEvent] = []
        if self._state == "text" and self._held:
            events.append(Content(self._held))
        elif self._state == "arguments" and self._held and not _is_json(self._arguments):
            events.append(Arguments(self.calls - 1, self._held))
        self._held = ""
        return events

    def _step(self, events: list[ToolEvent]) -> bool:
        """Take one mark off the held text; False when more text is needed."""
        if self._state == "text" or self._state == "between":
            before, mark, after = self._held.partition(OPEN)
            if mark:
                if self._state == "text" and before and (not self._blank or before.strip()):
                    events.append(Content(before))
                self._state, self._held = "head", after
                return True
            ready = len(self._held) - _overlap(self._held, OPEN)
            if self._state == "text" and (not self._blank or self._held[:ready].strip()) and ready:
                self._blank = False
                events.append(Content(self._held[:ready]))
                self._held = self._held[ready:]
            return False
        if self._state == "head":
            head, mark, after = self._held.partition(_MIDDLE)
            if not mark:
                return False
            events.append(CallStart(self.calls, f"call_{secrets.token_hex(12)}", head.removeprefix(_HEAD)))
            self.calls += 1
            self._state, self._held, self._arguments = "arguments", after, ""
            return True
        before, mark, after = self._held.partition(_CLOSE)
        ready = len(before) if mark else len(self._held) - _overlap(self._held, _CLOSE)
        if ready:
            events.append(Arguments(self.calls - 1, self._held[:ready]))
            self._arguments += self._held[:ready]
        self._held = after if mark else self._held[ready:]
        if mark:
            self._state = "between"
        return bool(mark)


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
