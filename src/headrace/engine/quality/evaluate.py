"""Sequences through the executor of one model: probabilities of given tokens, logits of every position, greedy answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.errors import HeadraceError, InvalidInput
from headrace.base.units import ceil_div
from headrace.control.request import Sampling
from headrace.control.step import BlockAppend, Chunk, RowResult, SlotInit, StepPlan
from headrace.engine.backend import Limits, LoadedModel
from headrace.spec.accounting import cache_layout, default_block_tokens

MAX_SEQUENCES = 64

Logits = npt.NDArray[np.float32]
Visit = Callable[[int, int, Logits], None]
"""Called with the index of a sequence, a position in it and fp32 logits [rows, vocab] of that position and those behind it."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """Greedy answers of several prompts that ran together, and the seconds of the steps that read and wrote them."""

    tokens: list[list[int]]
    prompt_s: float
    decode_s: float


class Evaluator:
    """Owns an executor with a KV pool of `capacity` tokens; sequences share steps up to that many. Not thread-safe.

    Every position reads the keys and values before it out of the cache, in its precision, as under a server.
    """

    def __init__(self, model: LoadedModel, capacity: int) -> None:
        self.vocab_size = model.spec.vocab_size
        self._layout = cache_layout(model.spec, model.kv_precision, default_block_tokens(model.kv_precision))
        self._blocks = ceil_div(capacity, self._layout.block_tokens) + MAX_SEQUENCES
        self._capacity = capacity
        limits = Limits(
            num_blocks=self._layout.num_groups * self._blocks,
            max_num_seqs=MAX_SEQUENCES,
            max_model_len=min(capacity, model.spec.max_context),
            max_batched_tokens=capacity,
        )
        self._longest = limits.max_model_len
        self._executor = model.executor(self._layout, limits, self._on_logits)
        self._visit: Visit | None = None
        self._owners: Sequence[int] = ()
        self._steps = 0

    def close(self) -> None:
        self._executor.close()

    def score(self, sequences: Sequence[Sequence[int]], visit: Visit | None = None) -> list[npt.NDArray[np.float64]]:
        """Log-probability (natural) of each token after the first, [length - 1] per sequence of at least two tokens.

        `visit` sees the logits behind them: row 0 of position p is the distribution of token p + 1.
        """
        found: list[npt.NDArray[np.float64]] = [np.empty(0)] * len(sequences)
        self._visit = visit
        sampling = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        try:
            for members in self._batches([len(s) for s in sequences]):
                self._owners = members
                inputs = [sequences[i] for i in members]
                chunks = [Chunk(slot, 0, len(tokens), sample=False) for slot, tokens in enumerate(inputs)]
                rows = self._run(chunks, inputs, [len(t) for t in inputs], sampling)
                for i, row in zip(members, rows, strict=True):
                    found[i] = np.array([entry.logprob for entry in row.prompt_logprobs])
        finally:
            self._visit = None
        return found

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> Greedy:
        """`count` most likely tokens after each prompt, the end of a text included like any other token."""
        answers: list[list[int]] = [[] for _ in prompts]
        prompt_s = decode_s = 0.0
        sampling = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True)
        for members in self._batches([len(p) + count for p in prompts]):
            inputs = [prompts[i] for i in members]
            for done in range(count):
                chunks = [
                    Chunk(slot, 0, len(p), sample=True) if done == 0 else Chunk(slot, len(p) + done - 1, 1, sample=True)
                    for slot, p in enumerate(inputs)
                ]
                begin = time.perf_counter()
                rows = self._run(chunks, inputs if done == 0 else (), [len(p) + count for p in inputs], sampling)
                if done == 0:
                    prompt_s += time.perf_counter() - begin
                else:
                    decode_s += time.perf_counter() - begin
                for i, row in zip(members, rows, strict=True):
                    answers[i].extend(row.token_ids)
        return Greedy(answers, prompt_s, decode_s)

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Indices of neighbouring sequences that fit into the pool together."""
        members: list[int] = []
        used = 0
        for i, length in enumerate(lengths):
            if not 0 < length <= self._longest:
                raise InvalidInput(f"sequence {i} has {length} tokens, not 1 to {self._longest}", field="window")
            if members and (used + length > self._capacity or len(members) == MAX_SEQUENCES):
                yield members
                members, used = [], 0
            members.append(i)
            used += length
        if members:
            yield members

    def _run(
        self, chunks: Sequence[Chunk], inputs: Sequence[Sequence[int]], room: Sequence[int], sampling: Sampling
    ) -> Sequence[RowResult]:
        """One step; `inputs` are put into slots 0, 1, … first, with blocks for `room` tokens each."""
        inits, appends, first = [], [], 0
        for slot, tokens in enumerate(inputs):
            inits.append(SlotInit(slot, f"sequence {slot}", tuple(tokens), len(tokens), sampling))
            needed = ceil_div(room[slot], self._layout.block_tokens)
            for group in range(self._layout.num_groups):
                begin = group * self._blocks + first
                appends.append(BlockAppend(slot, group, 0, tuple(range(begin, begin + needed))))
            first += needed
        plan = StepPlan(self._steps, tuple(i.slot for i in inits), tuple(inits), tuple(appends), chunks=tuple(chunks))
        self._steps += 1
        rows = self._executor.submit(plan).result().rows
        for row in rows:
            if row.error is not None:
                raise HeadraceError(f"the model failed: {row.error}", remedy="try another format of weights or KV")
        return rows

    def _on_logits(self, slot: int, position: int, logits: Any) -> None:
        if self._visit is not None:
            self._visit(
                self._owners[slot], position, logits if isinstance(logits, np.ndarray) else logits.cpu().numpy()
            )
