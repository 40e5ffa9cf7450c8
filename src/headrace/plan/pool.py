"""How an engine cuts its KV memory into pages, and what a request takes of it.

vLLM gives layers of one kind a group, all groups share pages of one size, and the token count it prints is derived from
that. SGLang splits the memory between full and windowed layers, and between attention and recurrent states, by fixed
ratios. The others follow the bytes. Layer caches come from `headrace.spec.accounting`; here is only the rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.base.units import ceil_div
from headrace.spec.accounting import LayerCache

SGLANG_WINDOW_RATIO = 0.8
"""SGLang's default ratio of windowed to full tokens (`--swa-full-tokens-ratio`)."""
SGLANG_STATE_RATIO = 0.9
"""SGLang's default ratio of state memory to attention memory in hybrids (`--mamba-full-memory-ratio`)."""


class Pool(Protocol):
    """KV memory of one rank."""

    @property
    def tokens(self) -> int:
        """The token count the engine would print."""
        ...

    def users(self, context: int) -> int:
        """Requests of `context` tokens that fit together."""
        ...

    def request_bytes(self, context: int) -> int:
        """Bytes of the pool that one such request takes."""
        ...


@dataclass(frozen=True, slots=True)
class BytePool:
    """No rounding beyond each layer's own blocks. `copies` of every recurrent state per request."""

    pool_bytes: int
    caches: tuple[LayerCache, ...]
    block_tokens: int
    copies: int = 1

    def request_bytes(self, context: int) -> int:
        held = 0
        for c in self.caches:
            blocks = (
                c.blocks(context, self.block_tokens)
                if c.window is None
                else ceil_div(c.tokens(context), self.block_tokens)
            )
            held += c.fixed_bytes * self.copies + blocks * self.block_tokens * c.token_bytes
        return held

    def users(self, context: int) -> int:
        need = self.request_bytes(context)
        return max(0, self.pool_bytes) // need if need else 0

    @property
    def tokens(self) -> int:
        slope = sum(c.token_bytes for c in self.caches)
        return max(0, self.pool_bytes) // (slope * self.block_tokens) * self.block_tokens if slope else 0


@dataclass(frozen=True, slots=True)
class PagedPool:
    """vLLM's pool for hybrids: groups of equally many layers share pages of equal size.

    `full`/`windowed`/`states`: numbers of groups of each kind; `full_block`/`window_block`: tokens of their pages.
    """

    num_pages: int
    page_bytes: int
    full: int
    full_block: int
    windowed: int
    window_block: int
    window: int
    states: int
    copies: int
    step_tokens: int
    max_model_len: int
    by_concurrency: bool

    def request_pages(self, context: int) -> int:
        pages = self.full * ceil_div(context, self.full_block) + self.states * self.copies
        if self.windowed:
            held = min(self.window - 1 + self.step_tokens, context)
            pages += self.windowed * (ceil_div(held, self.window_block) + 1)
        return pages

    def request_bytes(self, context: int) -> int:
        return self.request_pages(context) * self.page_bytes

    def users(self, context: int) -> int:
        return self.num_pages // self.request_pages(context)

    @property
    def tokens(self) -> int:
        if self.by_concurrency:
            return int(self.num_pages / self.request_pages(self.max_model_len) * self.max_model_len)
        groups = self.full + self.windowed + self.states
        return self.num_pages // groups * self.full_block


@dataclass(frozen=True, slots=True)
class SplitPool:
    """SGLang's pools for hybrids: windowed layers hold `SGLANG_WINDOW_RATIO` of the tokens, states their own share."""

    pool_bytes: int
    caches: tuple[LayerCache, ...]
    copies: int

    @property
    def _state(self) -> int:
        return sum(c.fixed_bytes for c in self.caches) * self.copies

    @property
    def _attention_bytes(self) -> float:
        return self.pool_bytes / (1 + SGLANG_STATE_RATIO) if self._state else float(self.pool_bytes)

    @property
    def tokens(self) -> int:
        full = sum(c.token_bytes for c in self.caches if c.window is None)
        windowed = sum(c.token_bytes for c in self.caches if c.window is not None)
        per_token = full + SGLANG_WINDOW_RATIO * windowed
        return int(max(0.0, self._attention_bytes) / per_token) if per_token else 0

    def users(self, context: int) -> int:
        by_tokens = self.tokens // context if context else 0
        if not self._state:
            return by_tokens
        return max(0, min(by_tokens, int((self.pool_bytes - self._attention_bytes) // self._state)))

    def request_bytes(self, context: int) -> int:
        return sum(c.fixed_bytes * self.copies + c.tokens(context) * c.token_bytes for c in self.caches)


def vllm_pool(
    pool_bytes: int,
    caches: tuple[LayerCache, ...],
    *,
    block_tokens: int,
    copies: int,
    step_tokens: int,
    max_model_len: int,
    by_concurrency: bool,
) -> Pool:
    """The pool vLLM would make of these layer caches; a model with one kind of layer needs no pages of its own."""
    growing = [c for c in caches if c.token_bytes and (c.window is None or c.window >= max_model_len)]
    windowed = [c for c in caches if c.token_bytes and c.window is not None and c.window < max_model_len]
    states = [c for c in caches if c.fixed_bytes and not c.token_bytes]
    kinds = [kind for kind in (growing, windowed, states) if kind]
    if len(kinds) < 2 or not growing:
        return BytePool(pool_bytes, caches, block_tokens, copies)
    token_bytes = max(c.token_bytes for c in growing)
    window_bytes = max((c.token_bytes for c in windowed), default=0)
    state = max((c.fixed_bytes for c in states), default=0)
    page = block_tokens * max(token_bytes, window_bytes)
    if state > page:
        # The attention page grows, in steps of 16 tokens, until a state fits.
        page = ceil_div(state, 16 * token_bytes) * 16 * token_bytes
    counts = [len(kind) for kind in kinds]
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    page_bytes = page * size
    return PagedPool(
        num_pages=max(0, pool_bytes) // page_bytes,
        page_bytes=page_bytes,
        full=ceil_div(len(growing), size),
        full_block=page // token_bytes,
        windowed=ceil_div(len(windowed), size),
        window_block=page // window_bytes if window_bytes else 1,
        window=max((c.window or 0 for c in windowed), default=0),
        states=ceil_div(len(states), size),
        copies=copies,
        step_tokens=step_tokens,
        max_model_len=max_model_len,
        by_concurrency=by_concurrency,
    )
