"""Running the sequences of one request: engine outputs in, pieces of text out, one ending each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

import msgspec

from headrace.control.api import EngineClient, Finish, FinishReason, Output, Timeline
from headrace.control.request import Request
from headrace.control.step import TokenLogprobs
from headrace.serve.errors import ApiError, engine_failed, unavailable
from headrace.serve.gate import Gate
from headrace.serve.metrics import Metrics
from headrace.text.stream import OutputText, TextToken

Token = TextToken[TokenLogprobs]

MOST_AT_ONCE = 64
"""Pieces that are written together when a reader was slow, so that what is not written yet stays small."""


class Ending(msgspec.Struct, frozen=True):
    """How a sequence ended, and its counts (prompt and completion tokens of this sequence alone)."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timeline: Timeline | None


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What sequence `index` says next. `tokens` joined are `text`, or empty where they have no log-probabilities. The last piece
    of a sequence has `ending`. `completion_tokens`: how many the sequence has by then, those held back included."""

    index: int
    text: str = ""
    tokens: tuple[Token, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    ending: Ending | None = None
    completion_tokens: int = 0


@dataclass(slots=True)
class SequenceRun:
    """One sequence in flight.

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
    _over: bool = field(default=False)

    def start(self, tell: Callable[[Piece | Exception], None]) -> None:
        """Submit; `tell` gets the pieces as they come, the last with its ending, or why there are no more: an `ApiError`
        500 when the engine failed on it."""

        def take(output: Output) -> None:
            try:
                self._take(output, tell)
            except Exception as error:
                tell(error)

        if not self._over:  # another run of its request may have failed before
            self.engine.follow(self.request, take)

    def leave(self) -> None:
        """Nobody wants more of it: what still runs is aborted. Every accepted sequence is counted once, here."""
        if self._over:
            return
        self._over = True
        self.engine.abandon(self.request.request_id)
        self.metrics.finished[self._outcome].inc()
        self.metrics.whole_s.observe(time.monotonic() - self.received_s)

    def _take(self, output: Output, tell: Callable[[Piece | Exception], None]) -> None:
        finish = output.finish
        if self.text.stopped is None:  # else only the ending is still of interest
            self._observe(len(output.token_ids))
            piece = self._piece(output)
            if piece is not None:
                tell(piece)
            if self.text.stopped is not None and finish is None:
                self.engine.abort(self.request.request_id)
        if finish is not None:
            try:
                last = self._ended(finish)
            finally:
                self.leave()
            tell(last)

    def _piece(self, output: Output) -> Piece | None:
        finish = output.finish
        if self.max_tokens == 0:
            return Piece(self.index, prompt_logprobs=output.prompt_logprobs) if output.prompt_logprobs else None
        if finish is None and len(output.token_ids) == 1 and not (output.logprobs or output.prompt_logprobs):
            said = self.text.push_text(output.token_ids[0])  # nobody wants more of a token than its text
            if said is not None:
                return Piece(self.index, said, completion_tokens=self.text.kept_tokens)
        ended_by_token = finish is not None and finish.stop_token_id is not None
        text, tokens = self.text.push(output.token_ids, output.logprobs, ended_by_token=ended_by_token)
        if not tokens and not output.prompt_logprobs:
            return None
        return Piece(self.index, text, tokens, output.prompt_logprobs, completion_tokens=self.text.kept_tokens)

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
            completion_tokens=0 if none else self.text.kept_tokens,
        )

    def _observe(self, tokens: int) -> None:
        if tokens == 0:
            return
        now_s = time.monotonic()
        if self._seen == 0:
            self.metrics.first_token_s.observe(now_s - self.received_s)
            self.metrics.prompt_tokens.inc(len(self.request.prompt_token_ids))
            gaps = tokens - 1
        else:
            gaps = tokens
        if gaps:
            self.metrics.between_tokens_s.observe((now_s - (self._last_s or now_s)) / gaps, gaps)
        self._last_s = now_s
        self._seen += tokens
        self.metrics.generation_tokens.value += tokens


def shown(tokens: Sequence[Token]) -> tuple[Token, ...]:
    """Tokens that are part of the text: not those without bytes (EOS, special ones)."""
    return tuple(token for token in tokens if token.raw or token.text)


Write = Callable[[Sequence[Piece]], Awaitable[None] | None]
"""Takes pieces to a reader; returns what to wait for before it may be called again, None if nothing."""


class Pieces:
    """Pieces of all runs of a request as they come; they run from entering the block to its end, which aborts what is left.

    A failure of one run ends all; `ApiError` 504 after `limit_s` seconds, 503 when the server shuts down and cannot wait.
    """

    __slots__ = (
        "_all_wanted", "_arrived", "_blocked", "_gate", "_held", "_limit_s", "_loop", "_runs", "_unfinished", "_waiter", "_write"
    )  # fmt: skip

    def __init__(self, runs: Sequence[SequenceRun], gate: Gate, limit_s: float) -> None:
        self._runs = runs
        self._gate = gate
        self._limit_s = limit_s
        self._unfinished = len(runs)
        self._arrived: list[Piece | Exception] = []
        self._all_wanted = False
        self._waiter: asyncio.Future[None] | None = None
        self._write: Write | None = None
        """Where pieces go at once, while a reader keeps up."""
        self._blocked: Awaitable[None] | None = None

    def __enter__(self) -> Pieces:
        self._loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            stack.callback(self._loop.call_later(self._limit_s, self._late).cancel)
            stack.enter_context(self._gate.on_cut(self._closing))
            for run in self._runs:
                stack.callback(run.leave)
            for run in self._runs:
                run.start(self._tell)
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write = None
        self._held.close()

    async def pour(self, write: Write) -> None:
        """Give every piece to `write`, until all runs have ended.

        While the reader keeps up, the engine's turn of the event loop does so itself, for all requests of a step one after
        the other; no task is woken. What a slow reader cannot take yet waits here, and is then written together.
        """
        while True:
            while self._arrived:
                if (blocked := write(self._take())) is not None:
                    await blocked
            if not self._unfinished:
                return
            self._write = write
            try:
                await self._wait()
            finally:
                self._write = None
            if self._blocked is not None:
                blocked, self._blocked = self._blocked, None
                await blocked

    async def all(self) -> list[Piece]:
        """Every piece, once all runs have ended; woken for the end or a failure only."""
        self._all_wanted = True
        while self._unfinished and not any(isinstance(item, Exception) for item in self._arrived):
            await self._wait()
        pieces: list[Piece] = []
        for item in self._arrived:
            if isinstance(item, Exception):
                raise item
            pieces.append(item)
        return pieces

    def _take(self) -> list[Piece]:
        """A bounded part of what has arrived; raises a failure that stands before the first piece."""
        taken = self._arrived[:MOST_AT_ONCE]
        pieces: list[Piece] = []
        for item in taken:
            if isinstance(item, Exception):
                if not pieces:
                    raise item
                break
            pieces.append(item)
        del self._arrived[: len(pieces)]
        return pieces

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _tell(self, item: Piece | Exception) -> None:
        wake = not self._all_wanted
        if isinstance(item, Exception):
            self._arrived.append(item)
            wake = True
            for run in self._runs:  # now, not when a reader that is stuck goes on or leaves
                run.leave()
        else:
            if item.ending is not None:
                self._unfinished -= 1
                wake |= not self._unfinished
            if self._write is None:
                self._arrived.append(item)
            elif (blocked := self._write((item,))) is not None:
                self._write, self._blocked = None, blocked
            else:
                wake = not self._unfinished
        if wake:
            self._write = None  # what follows waits for the task, so that the order is kept
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def _late(self) -> None:
        text = f"The request was not finished within this server's limit of {self._limit_s:g} s."
        self._tell(ApiError(504, text, kind="server_error", code="timeout"))

    def _closing(self) -> None:
        self._tell(unavailable("The server is shutting down and could not wait for this request.", 5, "draining"))
