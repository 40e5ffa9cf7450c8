"""An `EngineClient` whose outputs a test decides: exact tokens, faults, pauses. Everything else follows the contract."""

import asyncio
import contextlib
import functools
import hashlib
import time
from collections.abc import AsyncIterator, Callable

import numpy as np

from headrace.control.api import EngineInfo, EngineState, EngineStats, Finish, FinishReason, Output, Timeline
from headrace.control.request import Request
from headrace.control.step import TokenLogprobs
from headrace.text.grammar import GrammarTokens, mask_words, unpack_mask
from headrace.text.tokenizer import Tokenizer

BLOCK = 16
ORDINARY = (1000, 40000)
"""Ids of the test vocabulary among which the default reply draws: words and word pieces, nothing special."""


@functools.cache
def _grammar_tokens(tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> GrammarTokens:
    return GrammarTokens.of(tokenizer, eos_token_ids)


class ScriptedEngine:
    """`reply(request)` gives the tokens of a request (without EOS: the engine adds it, unless they exceed max_tokens).

    `fail_at`: how many tokens come before the sequence ends with an error. `hold_after`: how many come before it waits
    for `go`. `per_output`: tokens in one output.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_num_seqs: int = 64, max_model_len: int = 512) -> None:
        self.tokenizer = tokenizer
        self.reply: Callable[[Request], list[int]] = self.any_words
        self.per_output = 1
        self.pause_s = 0.0
        self.fail_at: int | None = None
        self.hold_after: int | None = None
        self.go = asyncio.Event()
        self.submitted: list[Request] = []
        self.started: list[str] = []
        self.finished: dict[str, FinishReason] = {}
        self.flushes = 0
        self.live: dict[str, Request] = {}
        self.state: EngineState = "ready"
        self.info = EngineInfo(
            model="scripted",
            model_type="llama",
            backend="scripted",
            vocab_size=tokenizer.vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=512,
            block_tokens=BLOCK,
            num_blocks=1000,
            kv_bytes_per_token=1,
            pool_tokens=1000 * BLOCK,
            weights_precision="f32",
            kv_precision="f32",
            notes=("this engine only repeats what it is told",),
        )
        self._aborted: set[str] = set()
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._waiting = 0
        self._cached: set[tuple[int, ...]] = set()
        self._hits = 0
        self._queries = 0
        self._killed = asyncio.Event()
        self._followed: dict[str, asyncio.Task[None]] = {}

    def say(self, text: str) -> None:
        """Every request is answered with this text."""
        ids = self.tokenizer.encode(text, add_special=False)
        self.reply = lambda request: ids

    def any_words(self, request: Request) -> list[int]:
        """Words that depend on the prompt and, unless greedy, on the seed; as many as are asked for."""
        low, high = ORDINARY
        seed = request.sampling.seed if request.sampling.temperature > 0 else None
        key = repr((request.prompt_token_ids, seed)).encode()
        return [
            low + int.from_bytes(hashlib.blake2b(key + str(i).encode(), digest_size=4).digest(), "big") % (high - low)
            for i in range(request.sampling.max_tokens)
        ]

    @property
    def stats(self) -> EngineStats:
        held = sum(-(-len(r.prompt_token_ids) // BLOCK) for r in self.live.values())
        return EngineStats(
            running=len(self.live),
            waiting=self._waiting,
            free_blocks=1000 - held,
            total_blocks=1000,
            prefix_queries_tokens=self._queries,
            prefix_hit_tokens=self._hits,
        )

    def follow(self, request: Request, sink: Callable[[Output], None]) -> None:
        self.reply(request)  # a script that fails does so here

        async def feed() -> None:
            async with contextlib.aclosing(self.generate(request)) as outputs:
                async for output in outputs:
                    if output.finish is not None:
                        del self._followed[request.request_id]
                    sink(output)

        self._followed[request.request_id] = asyncio.create_task(feed())

    def abandon(self, request_id: str) -> None:
        task = self._followed.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        self.submitted.append(request)
        if self.state != "ready":
            yield self._end(request, FinishReason.ERROR, 0, error="the engine is not running")
            return
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self.started.append(request.request_id)
        self.live[request.request_id] = request
        ended = False
        try:
            async for output in self._tokens(request):
                ended = output.finish is not None
                yield output
        finally:
            self.live.pop(request.request_id)
            self._slots.release()
            if not ended:
                self.finished[request.request_id] = FinishReason.ABORT

    async def _tokens(self, request: Request) -> AsyncIterator[Output]:
        sampling, prompt = request.sampling, request.prompt_token_ids
        cached = max((k for k in range(0, len(prompt), BLOCK) if prompt[:k] in self._cached), default=0)
        self._queries += len(prompt)
        self._hits += cached
        for k in range(0, len(prompt) + 1, BLOCK):
            self._cached.add(prompt[:k])
        asked = sampling.prompt_logprobs
        entries = () if asked is None else tuple(self._logprobs(t, asked) for t in prompt[1:])
        script = self._script(request)
        ids: list[int] = []
        pending: list[int] = []
        while True:
            if self.hold_after is not None and len(ids) >= self.hold_after:
                await self._go_or_end(request)
            await asyncio.sleep(self.pause_s if ids else 0)
            if self._killed.is_set() and self.state != "ready":
                yield self._end(request, FinishReason.ERROR, len(ids), error="the engine process ended with code -9")
                return
            if request.request_id in self._aborted:
                yield self._end(request, FinishReason.ABORT, len(ids), cached)
                return
            if self.fail_at is not None and len(ids) >= self.fail_at:
                yield self._end(request, FinishReason.ERROR, len(ids), error="logits are not a number")
                return
            token = next(script)
            ids.append(token)
            pending.append(token)
            stop = token in sampling.stopping_ids
            over = stop or len(ids) >= sampling.max_tokens
            if over or len(pending) >= self.per_output:
                finish = None
                if over:
                    reason = FinishReason.STOP if stop else FinishReason.LENGTH
                    finish = self._end(request, reason, len(ids), cached, stop_id=token if stop else None).finish
                scores = (
                    () if sampling.logprobs is None else tuple(self._logprobs(t, sampling.logprobs) for t in pending)
                )
                yield Output(request.request_id, tuple(pending), scores, entries, finish)
                entries, pending = (), []
                if over:
                    return

    def _script(self, request: Request):
        eos = request.sampling.eos_token_ids[0] if request.sampling.eos_token_ids else 2
        if request.sampling.grammar is None:
            yield from self.reply(request)
            while True:
                yield eos
        closers = [self.tokenizer.token_id(text) for text in '}"]']
        tokens = _grammar_tokens(self.tokenizer, request.sampling.eos_token_ids)
        matcher = tokens.matcher(request.sampling.grammar, request.sampling.min_tokens)
        row = np.zeros(mask_words(self.info.vocab_size), np.int32)
        wanted = self.reply(request) if self.reply != self.any_words else []
        position = 0
        while True:
            matcher.fill(row)
            allowed = unpack_mask(row, self.info.vocab_size)
            if position < len(wanted) and allowed[wanted[position]]:
                token, position = wanted[position], position + 1
            elif any(allowed[i] for i in request.sampling.eos_token_ids):
                token = next(i for i in request.sampling.eos_token_ids if allowed[i])
            else:
                token = next((i for i in closers if allowed[i]), int(np.flatnonzero(allowed)[0]))
            matcher.advance(token)
            yield token

    async def _go_or_end(self, request: Request) -> None:
        while not (self.go.is_set() or request.request_id in self._aborted or self._killed.is_set()):
            await asyncio.sleep(0.001)

    def _logprobs(self, token: int, top: int) -> TokenLogprobs:
        others = [(token + 7 * k) % self.info.vocab_size for k in range(top)]
        scores = tuple(-0.5 - 0.25 * k for k in range(top))
        return TokenLogprobs(token, -0.5, 1, tuple(others), scores)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        count: int,
        cached: int = 0,
        *,
        stop_id: int | None = None,
        error: str | None = None,
    ) -> Output:
        self.finished[request.request_id] = reason
        total_s = max(time.monotonic() - request.arrival_s, 0.0)
        prompt = len(request.prompt_token_ids)
        timeline = Timeline(
            queue_s=total_s / 4,
            prefill_s=total_s / 4,
            decode_s=total_s / 2,
            preempted_s=0.0,
            total_s=total_s,
            prefix_hit_tokens=cached,
            prefix_miss_tokens=prompt - cached,
            prefill_steps=1,
            decode_steps=max(count - 1, 0),
            preemptions=0,
        )
        return Output(request.request_id, finish=Finish(reason, prompt, count, cached, stop_id, error, timeline))

    def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)

    def kill(self) -> None:
        """The engine process is gone; everything in flight ends with an error."""
        self.state = "restarting"
        self._killed.set()

    def revive(self) -> None:
        self.state = "ready"
        self._killed.clear()

    async def flush_prefix_cache(self) -> None:
        self.flushes += 1
        self._cached.clear()

    async def close(self, drain_s: float = 0.0) -> None:
        self.state = "dead"
