"""Your own requests: JSONL of prompts or chats, or a ShareGPT file.

A line is `{"prompt": TEXT}` or `{"messages": [{"role", "content"}, …]}`, with `output_tokens` (or `max_tokens`) and
optionally `arrived_at` (seconds; taken with `--arrivals trace`), or ShareGPT's
`{"conversations": [{"from": "human", "value": …}, …]}`, which becomes one session: each human turn is a request, the file's
own answers form the history and give the answer lengths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.base.errors import InvalidInput
from headrace.bench.traffic import Call, Message, Script, Session, Stage, TrafficContext, WorkloadKind

_TOKENS_PER_WORD = 1.3


@dataclass(frozen=True, slots=True)
class Options:
    """`path` of the file; `osl`: answer tokens of entries that do not say."""

    path: str = ""
    osl: int = 128


@dataclass(frozen=True, slots=True)
class _Turn:
    messages: tuple[Message, ...]
    output: int


def sessions(options: Options, context: TrafficContext) -> Iterator[Session]:
    if not options.path:
        raise InvalidInput("the file workload needs a file", field="--file", remedy="--file PATH")
    index = 0
    for number, entry, arrival_s in _in_order(list(_entries(Path(options.path))), options.path):
        turns = _turns(entry, options, context, f"{options.path}, entry {number}")
        lengths = [context.fitting.fit(_tokens(t.messages, context), t.output) for t in turns]
        kept = [t for t, length in zip(turns, lengths, strict=True) if length]
        if kept:
            yield _session(index, kept, arrival_s, context)
            index += 1
    if index == 0:
        raise InvalidInput("holds no request that fits", field="--file")


def _in_order(
    entries: list[tuple[int, dict[str, Any]]], path: str
) -> Iterator[tuple[int, dict[str, Any], float | None]]:
    """Entries with their times, in seconds since the first; in order of time where each has one."""
    timed: list[tuple[int, dict[str, Any], float | None]] = []
    for number, entry in entries:
        at = entry.get("arrived_at")
        if at is not None and not (isinstance(at, int | float) and math.isfinite(at)):
            raise InvalidInput(f"{path}, entry {number}: arrived_at must be seconds, got {at!r}", field="--file")
        timed.append((number, entry, at))
    times = [at for _, _, at in timed if at is not None]
    if len(times) == len(timed):
        timed.sort(key=lambda entry: entry[2] or 0.0)
    first = min(times, default=0.0)
    for number, entry, at in timed:
        yield number, entry, None if at is None else float(at - first)


def _session(index: int, turns: list[_Turn], arrival_s: float | None, context: TrafficContext) -> Session:
    def script() -> Script:
        for turn in turns:
            yield Stage((Call(turn.messages, _tokens(turn.messages, context), turn.output),))

    return Session(index, len(turns), script, arrival_s)


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read {path}: {error}", field="--file") from None
    if text.lstrip().startswith("["):
        entries = [(number, entry) for number, entry in enumerate(_json(text, path, 1), 1)]
    else:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        entries = [(number, _json(line, path, number)) for number, line in lines]
    for number, entry in entries:
        if not isinstance(entry, dict):
            raise InvalidInput(f"entry {number} of {path} is not an object", field="--file")
        yield number, entry


def _json(text: str, path: Path, number: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"line {number} of {path} is not JSON: {error}", field="--file") from None


def _turns(entry: dict[str, Any], options: Options, context: TrafficContext, where: str) -> list[_Turn]:
    try:
        if "conversations" in entry:
            return _sharegpt(entry["conversations"], context)
        if "messages" in entry:
            messages = tuple(Message(_text(m["role"]), _text(m["content"])) for m in entry["messages"])
        else:
            messages = (Message("user", _text(entry["prompt"])),)
        asked = [entry[name] for name in ("output_tokens", "max_tokens") if entry.get(name) is not None]
        output = int(asked[0]) if asked else options.osl
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidInput(f"{where}: needs prompt, messages or conversations: {error!r}", field="--file") from None
    if not messages or output < 1:
        what = "a message" if not messages else f"at least one output token, not {output}"
        raise InvalidInput(f"{where}: needs {what}", field="--file")
    return [_Turn(messages, output)]


def _text(value: Any) -> str:
    """A text, or text parts of a message, joined as servers do."""
    if isinstance(value, list):
        return "\n".join(_text(part["text"]) for part in value)
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _sharegpt(turns: list[dict[str, str]], context: TrafficContext) -> list[_Turn]:
    roles = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
    history: list[Message] = []
    found: list[_Turn] = []
    for turn in turns:
        message = Message(roles[turn["from"]], _text(turn["value"]))
        if message.role == "assistant" and history and history[-1].role == "user":
            found.append(_Turn(tuple(history), max(1, _count(message.content, context))))
        history.append(message)
    return found


def _tokens(messages: tuple[Message, ...], context: TrafficContext) -> int:
    extra = context.writer.template_tokens + context.writer.message_tokens * (len(messages) - 1)
    return sum(_count(m.content, context) for m in messages) + extra


def _count(text: str, context: TrafficContext) -> int:
    """Real prose has more tokens per word than our own words, so the plain rate of the writer does not fit it."""
    if context.writer.count is not None:
        return context.writer.count(text)
    return round(len(text.split()) * _TOKENS_PER_WORD)


WORKLOAD = WorkloadKind("your own JSONL or ShareGPT file", Options, sessions, may_have_arrivals=True)
