"""The arithmetic of a step in torch: arrays → hidden states → logits → tokens, over one KV pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from headrace.control.step import TokenLogprobs
from headrace.engine.attention._contract import AttentionBackend
from headrace.engine.backend import Limits
from headrace.engine.batch import Batch, Ints
from headrace.engine.kv_formats import make_pool
from headrace.engine.layers.context import StepContext
from headrace.engine.layers.decoder import Decoder
from headrace.engine.layers.rope import HeadBuffer, rotation_table
from headrace.engine.sampler.rows import Rows, Sampled
from headrace.engine.sampler.sampler import sample, token_logprobs
from headrace.engine.sampler.state import SamplingState
from headrace.spec.cache import CacheLayout

_Geometry = tuple[int, int, int, int | None]
"""Query heads, KV heads, head dimension and the index of the rope."""


class Runner:
    """One model with its KV pool; see `headrace.engine.compute.Compute`."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        layout: CacheLayout,
        limits: Limits,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.vocab_size = decoder.spec.vocab_size
        self.pool = make_pool(layout, limits, dtype, device, len(decoder.blocks))
        self._decoder = decoder
        self._attention = attention
        self._device = device
        self._dtype = dtype
        self._kept = torch.empty(0)
        places = [layout.place(i) for i in range(len(decoder.blocks))]
        self._group_of = [group for group, _ in places]
        self._caches = [self.pool.layer(i, slot, group) for i, (group, slot) in enumerate(places)]
        self._tables = [rotation_table(rope, limits.max_model_len, device) for rope in decoder.ropes]
        # Layers that attend alike share what a step prepares.
        self._keys = [(group, kind.window) for group, kind in zip(self._group_of, decoder.kinds, strict=True)]
        self._attended = {key: decoder.kinds[self._keys.index(key)] for key in dict.fromkeys(self._keys)}
        self._prepared: dict[tuple[int, int | None], Any] = {}
        # Layers of one geometry and rope share the buffer that their heads are rotated to.
        parts = [block.attention for block in decoder.blocks]
        self._geometries = [(p.kind.num_heads, p.kind.num_kv_heads, p.kind.head_dim, p.rope) for p in parts]
        self._buffers: dict[_Geometry, HeadBuffer] = {}
        self._buffers_for = 0

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.pool.copy(sources, targets)

    def hidden(self, batch: Batch, rows: Ints, begun: Callable[[], None]) -> Ints:
        if len(tails := batch.tail_slots):
            self.pool.zero(tails)
        self.pool.begin(batch)
        context = self._context(batch)
        begun()
        hidden = self._decoder.hidden(context)
        self._kept = hidden
        if len(rows) != len(hidden) or (np.diff(rows) != 1).any():
            self._kept = hidden.index_select(0, torch.from_numpy(rows).to(self._device))
        # Every row counts, sampled or not: keys and values of a chunk that fails would be published to others.
        finite = np.isfinite(hidden.sum(-1).float().cpu().numpy())
        if finite.all():
            return np.empty(0, np.int64)
        return np.flatnonzero(~np.logical_and.reduceat(finite, batch.first_rows))

    def discard(self, blocks: Sequence[int]) -> None:
        self.pool.discard(blocks)

    def logits(self, first: int, count: int) -> torch.Tensor:
        return self._decoder.logits(self._kept[first : first + count])

    def sample(self, logits: torch.Tensor, rows: Rows, state: SamplingState) -> Sampled:
        return sample(logits, rows, state)

    def token_logprobs(self, logits: torch.Tensor, ids: Ints, wanted: Sequence[int]) -> list[TokenLogprobs] | None:
        if not bool(torch.isfinite(logits.sum())):
            return None
        return token_logprobs(logits, torch.from_numpy(ids).to(logits.device), wanted)

    def _context(self, batch: Batch) -> StepContext:
        to = self._device
        tokens = len(batch.positions)
        # Most steps decode one token of the sequences of the step before, and few of its tensors change. Others hand
        # nothing on: their masks and buffers may be large.
        decodes = tokens == len(batch.slots)
        if not decodes:
            self._prepared = {}
        if not decodes or self._buffers_for != tokens:
            self._buffers = {}
        positions = torch.from_numpy(batch.positions).to(to)
        rotations = [table.index_select(0, positions) for table in self._tables]
        prepared = {key: self._ready(key, batch) for key in self._attended}
        buffers = {geometry: self._buffer(geometry, tokens, rotations) for geometry in dict.fromkeys(self._geometries)}
        if decodes:
            self._prepared, self._buffers, self._buffers_for = prepared, buffers, tokens
        return StepContext(
            token_ids=batch.token_ids,
            heads=[buffers[g] for g in self._geometries],
            caches=self._caches,
            group_of=self._group_of,
            write_slots=[torch.from_numpy(s).to(to) for s in batch.write_slots],
            prepared=[prepared[key] for key in self._keys],
            attention=self._attention,
        )

    def _ready(self, key: tuple[int, int | None], batch: Batch) -> Any:
        """What the attention backend needs for the layers of one group and window."""
        spans = batch.spans(key[0])
        ready = self._prepared.pop(key, None)
        if ready is not None and self._attention.advance(ready, spans):
            return ready
        return self._attention.prepare(spans, self._attended[key], self._device, self._dtype, self.pool.dtype)

    def _buffer(self, geometry: _Geometry, tokens: int, rotations: Sequence[torch.Tensor]) -> HeadBuffer:
        rope = geometry[3]
        rotation = None if rope is None else rotations[rope]
        if (buffer := self._buffers.get(geometry)) is not None:
            buffer.turn(rotation)
            return buffer
        like = torch.empty(tokens, 0, dtype=self._dtype, device=self._device)
        return HeadBuffer(*geometry[:3], rotation, like)
