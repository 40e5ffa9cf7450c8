"""The messages between front-ends (HTTP server, `LLM`, bench) and an engine, and the client protocol they share.

Every accepted request ends with exactly one `Output` whose `finish` is set.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import Literal, Protocol

import msgspec

from headrace.control.request import Request
from headrace.control.step import TokenLogprobs


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Timeline(msgspec.Struct, frozen=True):
    """Where one request's time went, in seconds; the `*_s` parts add up to `total_s`.

    queue: until first scheduled · prefill: from there to the first token, less `preempted_s` spent before it ·
    decode: from the first token to the last · preempted: time spent evicted, waiting to be scheduled again.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    preempted_s: float
    total_s: float
    prefix_hit_tokens: int
    prefix_miss_tokens: int
    prefill_steps: int
    decode_steps: int
    preemptions: int


class Finish(msgspec.Struct, frozen=True):
    """How a request ended. `stop_token_id`: the id that ended it, if one did; it is the last of the request's tokens.

    Counts are of this sequence alone; `cached_tokens` is the part of the prompt taken from the prefix cache.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    stop_token_id: int | None = None
    error: str | None = None
    timeline: Timeline | None = None


class Output(msgspec.Struct, frozen=True):
    """New tokens of one request; `logprobs` has one entry per token when they were asked for.

    `prompt_logprobs` comes complete, once, with or before the first token (entry i is for prompt position i + 1).
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot after a step. Counters only grow (from the engine's start)."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    cached_blocks: int = 0
    prefix_queries_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    prefill_tokens_computed: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    step_s: float = 0.0
    compute_s: float = 0.0

    @property
    def kv_usage(self) -> float:
        """Share of blocks held by live requests (blocks kept only by the prefix cache count as free)."""
        return 0.0 if self.total_blocks == 0 else 1.0 - self.free_blocks / self.total_blocks


class MemoryItem(msgspec.Struct, frozen=True):
    """One allocation: what accounting predicted beside what was really allocated, in bytes."""

    name: str
    predicted_bytes: int
    actual_bytes: int


class EngineInfo(msgspec.Struct, frozen=True):
    """Resolved facts of a running engine."""

    model: str
    model_type: str
    backend: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    block_tokens: int
    num_blocks: int
    kv_bytes_per_token: int
    pool_tokens: int
    weights_precision: str
    kv_precision: str
    memory: tuple[MemoryItem, ...] = ()
    notes: tuple[str, ...] = ()
    startup_s: dict[str, float] = {}


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class FlushPrefixCache(msgspec.Struct, frozen=True, tag="flush"):
    """Forget every cached prefix that no live request holds."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the engine process; `drain_s` lets running requests finish for that long first."""

    drain_s: float = 0.0


ToEngine = Submit | Abort | FlushPrefixCache | Shutdown


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: EngineInfo


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Outputs of one committed step (or of an abort or a flush), with the stats after it."""

    outputs: tuple[Output, ...]
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not start or cannot go on; `field` and `remedy` as in `HeadraceError`."""

    kind: str
    message: str
    field: str | None = None
    remedy: str | None = None


FromEngine = Ready | StepOutputs | Failed

EngineState = Literal["starting", "ready", "restarting", "draining", "dead"]


class EngineClient(Protocol):
    """One engine as a front-end sees it, in another process or in this one."""

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine; raises `EngineDead` before the first `ready`."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot received."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Output]:
        """Submit and stream outputs, the last one with `finish`. Closing the iterator early aborts the request.

        An engine that dies meanwhile yields a final `Output` with reason `error`; it never hangs and never raises for
        a fault that is not the caller's.
        """
        ...

    def follow(self, request: Request, sink: Callable[[Output], None]) -> None:
        """Submit, and have `sink` called with each output on the calling event loop, the last with `finish`: what a step
        made for many requests comes in one turn of the loop, without a task for each. `sink` must not block or raise; it
        may be called before this returns. Raises `InvalidInput` for the id of a request in flight."""
        ...

    def abandon(self, request_id: str) -> None:
        """Abort a request whose outputs nobody wants any more; its sink is not called again. Unknown ids are ignored."""
        ...

    def abort(self, request_id: str) -> None:
        """Ask for the early end of a request that is still read or followed: it then ends with a `Finish` of reason `abort`,
        which carries the counts and the timeline (closing or abandoning it instead drops them). Unknown ids are ignored."""
        ...

    async def flush_prefix_cache(self) -> None: ...

    async def close(self, drain_s: float = 0.0) -> None: ...
