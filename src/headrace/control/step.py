"""The messages between scheduler and executor: one `StepPlan` in, one `StepResult` out.

There are no phases: a chunk says which token positions of which slot to compute. Prefill, chunked prefill, decode,
recompute after preemption and draft verification differ only in their ranges.

An executor owns *slots*. A slot holds one sequence's token ids, block tables and sampling state. Plans carry only what
changed, so that plan n+1 can be issued while n still runs: the token that n samples is appended to the slot by the
executor itself and is the input of n+1 without a detour through the scheduler.

Order inside a step: releases, inits, appends, copies, then chunks. Plans are executed strictly in the order submitted.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from headrace.control.request import Sampling


class SlotInit(msgspec.Struct, frozen=True):
    """Put a sequence into a free slot. `token_ids`: all tokens known so far (prompt, then those generated before a
    preemption); `prompt_length` of them are the prompt. The index of the next generated token, which seeds its random
    draw and counts towards min_tokens, is len(token_ids) - prompt_length."""

    slot: int
    request_id: str
    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: Sampling


class BlockAppend(msgspec.Struct, frozen=True):
    """Block ids for logical block positions `first`, first+1, … of the slot's table in cache group `group`.

    A position may be given again later: the executor then uses the new block, whose computed content is the same. An id
    of -1 marks a block behind a sliding window that is not kept. Blocks that fall behind the window while the sequence
    runs are not announced: in a group with a window, an executor must never read a block that lies wholly before
    position start - window + 1 of the chunk (its table may still name it, and it may belong to someone else by now).
    """

    slot: int
    group: int
    first: int
    block_ids: tuple[int, ...]


class BlockCopy(msgspec.Struct, frozen=True):
    """Copy a whole block (all its layers) before the chunks run."""

    source: int
    target: int


class Chunk(msgspec.Struct, frozen=True):
    """Compute positions [start, start + length) of a slot: write their KV, attend to all earlier positions.

    With `sample`, the logits of the last position give the next token, which the executor appends to the slot.
    `drafts`: proposed tokens that the executor places at the end of the range (the last len(drafts) positions); it
    verifies them, keeps the accepted ones and appends one more sampled token.
    """

    slot: int
    start: int
    length: int
    sample: bool
    drafts: tuple[int, ...] = ()


class StepPlan(msgspec.Struct, frozen=True):
    """Everything one step does."""

    step_id: int
    releases: tuple[int, ...] = ()
    inits: tuple[SlotInit, ...] = ()
    appends: tuple[BlockAppend, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(c.length for c in self.chunks)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probability of a token and the most likely alternatives at its position, best first (natural log)."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class RowResult(msgspec.Struct, frozen=True):
    """What one chunk produced. `token_ids` is empty for a chunk that did not sample.

    `prompt_logprobs` holds entries for the chunk's prompt positions in order, position 0 of the prompt excluded.
    `error` says why this row alone failed (for example NaN logits); its KV must not be published. The executor goes on
    as if it had sampled any valid token, since a step already planned may continue the slot; that row is discarded.
    """

    slot: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


class StepResult(msgspec.Struct, frozen=True):
    """One row per chunk, in the plan's order. `compute_s`: time inside the model; `total_s`: the executor's whole step."""

    step_id: int
    rows: tuple[RowResult, ...]
    compute_s: float = 0.0
    total_s: float = 0.0


class StepHandle(Protocol):
    """A step in flight."""

    def done(self) -> bool: ...

    def result(self) -> StepResult:
        """Wait for the step. Raises what the executor raised; then every slot's state is undefined."""
        ...


class Executor(Protocol):
    """Runs whole step plans. `submit` does not block on the step; at most a few steps are in flight."""

    def submit(self, plan: StepPlan) -> StepHandle: ...

    def reset(self) -> None:
        """After a step raised: wait for what still runs, forget every step in flight and empty every slot. The next plan
        finds the executor as new (its KV blocks may hold anything)."""
        ...

    def close(self) -> None: ...


class Idler(Protocol):
    """What an executor may have besides: work of its own that makes later steps faster and that nobody waits for."""

    def idle(self) -> bool:
        """Do a few milliseconds of it, without changing what any step computes; False when none is left. Called while
        there is neither work nor a message, by the thread that submits; a message that arrives waits for it."""
        ...
