"""The arithmetic of a step in torch: arrays → hidden states → logits → tokens, over one KV pool."""

from __future__ import annotations

from collections.abc import Sequence

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
        self._shared: dict[tuple[int, int | None], list[int]] = {}
        # Layers of one geometry and rope share the buffer that their heads are rotated to.
        parts = [block.attention for block in decoder.blocks]
        self._geometries = [(p.kind.num_heads, p.kind.num_kv_heads, p.kind.head_dim, p.rope) for p in parts]
        for i, kind in enumerate(decoder.kinds):
            self._shared.setdefault((self._group_of[i], kind.window), []).append(i)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.pool.copy(sources, targets)

    def hidden(self, batch: Batch, rows: Ints) -> Ints:
        if len(batch.tail_slots):
            self.pool.zero(batch.tail_slots)
        self.pool.begin(batch)
        hidden = self._decoder.hidden(self._context(batch))
        self._kept = hidden
        if len(rows) != len(hidden) or (np.diff(rows) != 1).any():
            self._kept = hidden.index_select(0, torch.from_numpy(rows).to(self._device))
        # Every row counts, sampled or not: keys and values of a chunk that fails would be published to others.
        finite = torch.isfinite(hidden.sum(-1)).cpu().numpy()
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
        positions = torch.from_numpy(batch.positions).to(to)
        prepared: list = [None] * len(self._caches)
        for (group, _), layers in self._shared.items():
            kind = self._decoder.kinds[layers[0]]
            ready = self._attention.prepare(batch.spans(group), kind, to, self._dtype, self.pool.dtype)
            for i in layers:
                prepared[i] = ready
        return StepContext(
            token_ids=batch.token_ids,
            heads=self._heads(positions),
            caches=self._caches,
            group_of=self._group_of,
            write_slots=[torch.from_numpy(s).to(to) for s in batch.write_slots],
            prepared=prepared,
            attention=self._attention,
        )

    def _heads(self, positions: torch.Tensor) -> list[HeadBuffer]:
        rotations = [table.index_select(0, positions) for table in self._tables]
        like = torch.empty(len(positions), 0, dtype=self._dtype, device=self._device)
        made = {
            g: HeadBuffer(*g[:3], None if g[3] is None else rotations[g[3]], like)
            for g in dict.fromkeys(self._geometries)
        }
        return [made[g] for g in self._geometries]
