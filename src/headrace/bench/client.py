"""One streamed request, with a stamp on everything that can be seen of it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec

from headrace.bench.endpoint import Endpoint, Usage
from headrace.bench.records import Outcome, RequestRecord, TokenSource
from headrace.bench.traffic import Call, Message

_MOST_PREOPENED = 256
_LONGEST_LINE = 2**24
_BOM = b"\xef\xbb\xbf"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    """What is read of a choice; servers send null where they have nothing."""

    delta: _Delta | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None


@dataclass(slots=True)
class _Event:
    at_s: float
    text: str
    token_ids: int | None
    usage_tokens: int | None


@dataclass(slots=True)
class Stream:
    """What one response has said so far; filled by `feed`, judged by `outcome`."""

    events: list[_Event] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: str | None = None
    done: bool = False
    error: str = ""
    id: str = ""
    _begun: bool = False
    _rest: bytes = b""
    _open: bytes = b""
    """Data of an event whose JSON goes on in its next line."""
    _event: bytes = b""
    _decoder: msgspec.json.Decoder[_Chunk] = field(default_factory=lambda: msgspec.json.Decoder(_Chunk))

    def feed(self, data: bytes, at_s: float) -> None:
        """Take the bytes of one read; all events in it get the same time, since they could be seen together.

        Lines end in LF, CRLF or CR. An event is taken as soon as its JSON is whole, so with or without an empty line after
        it; one whose JSON is in several lines of data, joined.
        """
        data = self._rest + data
        if not self._begun:
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._rest = data
                return
            data, self._begun = data.removeprefix(_BOM), True
        if b"\r" in data:
            held = data.endswith(b"\r")  # perhaps the first half of CRLF
            data = data[: len(data) - held].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + b"\r" * held
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            self._line(line, at_s)
        if len(self._rest) > _LONGEST_LINE:
            self.error = self.error or f"a line of more than {_LONGEST_LINE:,} bytes"

    def finish(self, at_s: float) -> None:
        """The stream has ended: take a last line that has no end. What is not whole is left out."""
        line, self._rest = self._rest.rstrip(b"\r"), b""
        self._line(line, at_s)

    def _line(self, line: bytes, at_s: float) -> None:
        if line.startswith(b"data:"):
            self._take(line[5:].strip(), at_s)
        elif line.startswith(b"event:"):
            self._event = line[6:].strip()
        elif not line:
            if self._open:
                self.error = self.error or f"not a chunk: {self._open[:100]!r}"
            self._open = self._event = b""

    def _take(self, data: bytes, at_s: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        if self._open:
            data = self._open + b"\n" + data
        if not data:  # nothing said, as some servers do to keep a connection open
            return
        try:
            chunk = self._decoder.decode(data)
        except msgspec.ValidationError as error:
            self.error = self.error or f"not a chunk: {error}: {data[:100]!r}"
            return
        except msgspec.DecodeError:
            self._open = data
            if len(data) > _LONGEST_LINE:
                self.error = self.error or f"an event of more than {_LONGEST_LINE:,} bytes"
            return
        self._open = b""
        if chunk.error is not None:
            self.error = self.error or _error_text(chunk.error)
            return
        if self._event == b"error":
            self.error = self.error or data[:300].decode(errors="replace")
            return
        self.id = self.id or chunk.id or ""
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices or ():
            self.finish_reason = choice.finish_reason or self.finish_reason
            text = choice.text or ""
            if choice.delta is not None:
                delta = choice.delta
                text = delta.content or delta.reasoning_content or delta.reasoning or ("tool" * bool(delta.tool_calls))
            if text:
                ids = len(choice.token_ids) if choice.token_ids else None
                self.events.append(_Event(at_s, text, ids, chunk.usage.completion_tokens if chunk.usage else None))

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    def tokens(self) -> tuple[list[float], TokenSource]:
        """Tokens of each event, and how they are known.

        Per-chunk usage or token ids are exact. Else, a total equal to the number of events means one token each (one
        more is an invisible end token). Else the total is spread over the events by their share of the text.
        """
        if not self.events:
            return [], TokenSource.ASSUMED
        counts = [event.usage_tokens for event in self.events if event.usage_tokens is not None]
        if len(counts) == len(self.events):
            steps = [float(after - before) for before, after in zip([0, *counts], counts, strict=False)]
            if min(steps) >= 0 and (len(steps) > 1 or self.usage is None or counts[0] == self.usage.completion_tokens):
                return steps, TokenSource.CHUNK_USAGE
        if all(event.token_ids is not None for event in self.events):
            return [float(event.token_ids or 0) for event in self.events], TokenSource.TOKEN_IDS
        if self.usage is None:
            return [1.0] * len(self.events), TokenSource.ASSUMED
        total = self.usage.completion_tokens
        if total == len(self.events) or (total == len(self.events) + 1 and self.finish_reason == "stop"):
            return [1.0] * len(self.events), TokenSource.ONE_PER_CHUNK
        whole = len(self.text)
        return [total * len(event.text) / whole for event in self.events], TokenSource.SPREAD


def _error_text(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


class Client:
    """Sends calls to one endpoint over kept-alive connections. `origin_s`: the run's zero on CLOCK_MONOTONIC."""

    def __init__(self, endpoint: Endpoint, origin_s: float) -> None:
        self.endpoint = endpoint
        self.origin_s = origin_s
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(_stamp_sent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
            timeout=aiohttp.ClientTimeout(total=endpoint.timeout_s, sock_connect=min(30.0, endpoint.timeout_s)),
            trace_configs=[trace],
            read_bufsize=2**20,
        )
        self._headers = {**dict(endpoint.headers), "Content-Type": "application/json", "Accept": "text/event-stream"}

    def now(self) -> float:
        return time.monotonic() - self.origin_s

    async def close(self) -> None:
        await self._session.close()

    async def connect(self, connections: int) -> None:
        """Open connections ahead of the run, so that no request pays for the handshake; failures show in the run."""

        async def touch() -> None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with self._session.get(
                    self.endpoint.url + "/v1/models", headers=dict(self.endpoint.headers)
                ) as r:
                    await r.read()

        await asyncio.gather(*(touch() for _ in range(min(connections, _MOST_PREOPENED))))

    async def send(self, call: Call, record: RequestRecord) -> str:
        """Send one call and fill in `record` (which has its indices and `intended_s`). Returns the reply's text.

        Never raises for what the server does: every failure is an outcome of the record.
        """
        body = msgspec.json.encode(self.endpoint.body(wire_prompt(call, self.endpoint.kind), call.output_tokens))
        record.prompt_tokens_declared = call.prompt_tokens
        record.shared_tokens_declared = call.shared_tokens
        record.output_tokens_asked = call.output_tokens
        record.prompt_hash = hashlib.blake2b(body, digest_size=8).hexdigest()
        stream = Stream()
        try:
            try:
                await self._exchange(body, record, stream)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                # A server may close an idle connection at the moment we choose it. Nothing was answered, so nothing was
                # lost: ask once more on a fresh one. The latency still counts from the intended time.
                if record.headers_s or isinstance(error, aiohttp.ClientConnectorError):
                    raise
                record.reconnected = True
                await self._exchange(body, record, stream)
        except TimeoutError:
            record.outcome, record.error = Outcome.TIMEOUT, f"no end within {self.endpoint.timeout_s} s"
        except aiohttp.ClientConnectorError as error:
            record.outcome, record.error = Outcome.REFUSED, str(error)[:300]
        except (aiohttp.ClientError, OSError) as error:
            record.outcome, record.error = Outcome.CUT, f"{type(error).__name__}: {error}"[:300]
        record.end_s = self.now()
        settle(record, stream, force_length=self.endpoint.force_length)
        return stream.text

    async def _exchange(self, body: bytes, record: RequestRecord, stream: Stream) -> None:
        """Send the body and read the stream to its end, stamping both; raises what aiohttp raises."""
        stamps = SimpleNamespace(sent_s=0.0)
        url = self.endpoint.url + self.endpoint.path
        record.sent_s = self.now()
        async with self._session.post(url, data=body, headers=self._headers, trace_request_ctx=stamps) as response:
            record.headers_s = self.now()
            record.sent_s = stamps.sent_s - self.origin_s if stamps.sent_s else record.sent_s
            record.http_status = response.status
            if response.status != 200:
                record.error = (await response.text(errors="replace"))[:300]
                return
            beginning = b""
            async for data in response.content.iter_any():
                at_s = self.now()
                record.first_byte_s = record.first_byte_s or at_s
                beginning = beginning or data[:100]
                stream.feed(data, at_s)
                if stream.error:
                    return
            stream.finish(self.now())
            if beginning and not stream.events and not stream.done and not stream.finish_reason:
                what = response.headers.get("Content-Type", "of no type")
                record.error = f"no event of a stream in the answer ({what}): {beginning!r}"


async def _stamp_sent(_session: Any, context: Any, _params: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.sent_s = time.monotonic()


def wire_prompt(call: Call, kind: str) -> Any:
    """The prompt as the endpoint takes it: chat messages, or a text (messages joined by blank lines) or token ids."""
    if isinstance(call.prompt, str):
        return [{"role": "user", "content": call.prompt}] if kind == "chat" else call.prompt
    if call.prompt and isinstance(call.prompt[0], Message):
        if kind == "chat":
            return [{"role": m.role, "content": m.content} for m in call.prompt if isinstance(m, Message)]
        return "\n\n".join(m.content for m in call.prompt if isinstance(m, Message))
    return list(call.prompt)


def settle(record: RequestRecord, stream: Stream, *, force_length: bool) -> None:
    """Copy the stream into the record and judge it: only a complete, non-empty answer of the right length is `ok`."""
    tokens, record.token_source = stream.tokens()
    record.event_s = [round(event.at_s, 7) for event in stream.events]
    record.event_tokens = tokens
    record.finish_reason = stream.finish_reason
    record.response_id = stream.id
    if stream.usage is not None:
        record.prompt_tokens = stream.usage.prompt_tokens
        record.output_tokens = stream.usage.completion_tokens
        record.cached_tokens = stream.usage.cached_tokens
    if record.outcome is not Outcome.OK:
        return
    if record.http_status != 200:
        record.outcome = Outcome.HTTP_ERROR
    elif stream.error:
        record.outcome, record.error = Outcome.STREAM_ERROR, stream.error
    elif not stream.done and stream.finish_reason is None:
        record.outcome = Outcome.CUT
        record.error = record.error or "the stream ended without a finish reason or [DONE]"
    elif not stream.events:
        record.outcome, record.error = Outcome.EMPTY, "no text in the answer"
    elif force_length and _counted(record) and round(record.tokens_out) != record.output_tokens_asked:
        record.outcome = Outcome.WRONG_LENGTH
        record.error = f"{record.tokens_out:.0f} tokens instead of {record.output_tokens_asked}"
    elif _goes_back(record):
        record.outcome, record.error = Outcome.NEGATIVE_TIME, "a time stamp lies before the one it follows"


def _counted(record: RequestRecord) -> bool:
    return record.output_tokens is not None or record.token_source is not TokenSource.ASSUMED


def _goes_back(record: RequestRecord) -> bool:
    times = [record.intended_s, record.sent_s, record.headers_s, *record.event_s, record.end_s]
    return any(later < earlier - 1e-6 for earlier, later in itertools.pairwise(times))
