"""Running the sequences of one request: engine outputs in, pieces of text out, one ending each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.control.api import EngineClient, Finish, FinishReason, Output, Timeline
from headrace.control.request import Request
from headrace.control.step import TokenLogprobs
from headrace.serve.errors import ApiError, engine_failed, unavailable
from headrace.serve.gate import Gate
from headrace.serve.metrics import Metrics
from headrace.text.stream import OutputText, TextToken

Token = TextToken[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence ended, and its counts (prompt and completion tokens of this sequence alone)."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timeline: Timeline | None


@dataclass(frozen=True, slots=True)
class Piece:
    """What sequence `index` says next. `tokens` joined are `text`. The last piece of a sequence has `ending`."""

    index: int
    text: str = ""
    tokens: tuple[Token, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    ending: Ending | None = None


@dataclass(slots=True)
class SequenceRun:
    """One sequence in flight. `pieces` may be iterated once; leaving it early aborts the sequence in the engine.

    `max_tokens` 0 means that only the prompt is wanted: the one token that the engine makes is dropped.
    """

    index: int
    request: Request
    text: OutputText[TokenLogprobs]
    engine: EngineClient
    metrics: Metrics
    received_s: float
    max_tokens: int
    _last_s: float = field(default=0.0)
    _seen: int = field(default=0)
    _outcome: FinishReason = field(default=FinishReason.ABORT)

    async def pieces(self) -> AsyncGenerator[Piece]:
        """The sequence's pieces, the last with its ending; `ApiError` 500 when the engine failed on it."""
        try:
            async with contextlib.aclosing(self.engine.generate(self.request)) as outputs:  # type: ignore[type-var]
                async for piece in self._read(outputs):
                    yield piece
        finally:
            # on a failure or a disconnect too: every accepted sequence is counted once
            self.metrics.finished[self._outcome].inc()
            self.metrics.prompt_tokens.inc(len(self.request.prompt_token_ids))
            self.metrics.generation_tokens.inc(self._seen)
            self.metrics.whole_s.observe(time.monotonic() - self.received_s)

    async def _read(self, outputs: AsyncIterator[Output]) -> AsyncGenerator[Piece]:
        finish: Finish | None = None
        async for output in outputs:
            finish = output.finish
            if self.text.stopped is not None:
                continue  # only the ending is still of interest
            self._observe(len(output.token_ids))
            piece = self._piece(output)
            if piece is not None:
                yield piece
            if self.text.stopped is not None and finish is None:
                self.engine.abort(self.request.request_id)
        if finish is None:
            self._outcome = FinishReason.ERROR
            raise engine_failed("The engine ended this request without a result.")
        yield self._ended(finish)

    def _piece(self, output: Output) -> Piece | None:
        ended_by_token = output.finish is not None and output.finish.stop_token_id is not None
        if self.max_tokens == 0:
            return Piece(self.index, prompt_logprobs=output.prompt_logprobs) if output.prompt_logprobs else None
        delta = self.text.push(output.token_ids, output.logprobs, ended_by_token=ended_by_token)
        if not delta.tokens and not output.prompt_logprobs:
            return None
        return Piece(self.index, delta.text, delta.tokens, output.prompt_logprobs)

    def _ended(self, finish: Finish) -> Piece:
        """The last piece: what was held back, and how it ended."""
        stopped = self.text.stopped is not None
        match finish.reason:
            case FinishReason.STOP:
                reason: Literal["stop", "length"] = "stop"
            case FinishReason.LENGTH:
                reason = "stop" if stopped else "length"
            case FinishReason.ABORT if stopped:
                reason = "stop"
            case FinishReason.ABORT | FinishReason.ERROR:
                self._outcome = finish.reason
                if finish.reason is FinishReason.ABORT:
                    raise ApiError(
                        503,
                        finish.error or "The server ended this request.",
                        kind="server_error",
                        code="request_aborted",
                    )
                raise engine_failed(finish.error or "The engine failed on this request.")
        delta = self.text.finish()
        if self.text.stopped is not None:
            reason = "stop"
        self._outcome = FinishReason(reason)
        none = self.max_tokens == 0
        return Piece(
            self.index,
            "" if none else delta.text,
            () if none else delta.tokens,
            ending=Ending(
                reason="length" if none else reason,
                prompt_tokens=finish.prompt_tokens,
                completion_tokens=0 if none else self.text.kept_tokens,
                cached_tokens=finish.cached_tokens,
                timeline=finish.timeline,
            ),
        )

    def _observe(self, tokens: int) -> None:
        if tokens == 0:
            return
        now_s = time.monotonic()
        if self._seen == 0:
            self.metrics.first_token_s.observe(now_s - self.received_s)
            gaps = tokens - 1
        else:
            gaps = tokens
        if gaps:
            gap_s = (now_s - (self._last_s or now_s)) / gaps
            for _ in range(gaps):
                self.metrics.between_tokens_s.observe(gap_s)
        self._last_s = now_s
        self._seen += tokens


def shown(tokens: Sequence[Token]) -> tuple[Token, ...]:
    """Tokens that are part of the text: not those without bytes (EOS, special ones)."""
    return tuple(token for token in tokens if token.raw or token.text)


async def interleaved(runs: Sequence[SequenceRun], gate: Gate, limit_s: float) -> AsyncGenerator[Piece]:
    """Pieces of all runs as they come. A failure of one ends all; `ApiError` 504 after `limit_s` seconds, 503 when the
    server shuts down and cannot wait.

    Leaving the iterator early aborts every run.
    """
    arrived: asyncio.Queue[Piece | Exception] = asyncio.Queue()
    late = ApiError(
        504,
        f"The request was not finished within this server's limit of {limit_s:g} s.",
        kind="server_error",
        code="timeout",
    )
    closing = unavailable("The server is shutting down and could not wait for this request.", 5, "draining")
    timer = asyncio.get_running_loop().call_later(limit_s, arrived.put_nowait, late)

    async def follow(run: SequenceRun) -> None:
        try:
            async with contextlib.aclosing(run.pieces()) as pieces:
                async for piece in pieces:
                    arrived.put_nowait(piece)
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(follow(run)) for run in runs]
    try:
        with gate.on_cut(lambda: arrived.put_nowait(closing)):
            unfinished = len(runs)
            while unfinished:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                unfinished -= item.ending is not None
                yield item
    finally:
        timer.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
