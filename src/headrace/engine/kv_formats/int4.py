"""INT4 as in KIVI (Liu et al., 2024): keys by channel, values by token.

A few channels of the keys are large in every token, so a scale per token would be spent on them; a channel over 32 tokens is
even. Hence the keys of a *group* of 32 neighbouring tokens share, per head and channel, a scale and a minimum in fp16; a value
vector has its own scale and minimum per token and head.

A group's scales are known once it is full. Until then its keys are *staged*: kept as they are computed, one group per slot and
layer, and whoever attends from inside a group sees its keys staged and those of earlier groups in 4 bits. So what a token sees
depends on its position alone, not on how a prompt was cut into chunks or on its batch mates.

Only whole blocks are shared (`CacheLayout.whole_blocks`). Whoever goes on inside a group whose keys are not staged, after a copy
of its block or because drafts were taken back beyond its end, stages what its codes say: they are kept up to date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from headrace.base.errors import InvalidInput
from headrace.engine.attention._contract import AttentionBackend
from headrace.engine.attention._grouped import GROUP, GROUPED
from headrace.engine.backend import Limits
from headrace.engine.batch import Batch
from headrace.engine.kv_formats._coded import CodedPool, spread
from headrace.engine.staging import StagedGroups, group_places, touched_groups
from headrace.spec.cache import CacheLayout

LEVELS = 15
LARGEST = torch.finfo(torch.float16).max
"""Larger keys are stored as this."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Indices of one step for the layers of one cache group; groups touched by the step's sequences in order, [groups].

    `slots` [sequences]; `sources` [groups * GROUP]: for each token of a touched group its row among the step's keys followed by
    the staged ones of `slots` (a token not there yet repeats the last one); `places`: the groups in the pool; `last`: the last
    touched group of each sequence. `restored_slots`, `restored_places`: what must be staged from the pool first.
    """

    slots: torch.Tensor
    sources: torch.Tensor
    places: torch.Tensor
    last: torch.Tensor
    restored_slots: torch.Tensor
    restored_places: torch.Tensor


class Int4Pool(CodedPool):
    """Per layer of a block: `codes` [block_tokens, 2 * kv_heads, head_dim / 2], two to a byte, the even one low;
    `key_scales` [groups, kv_heads, head_dim, 2] and `value_scales` [block_tokens, kv_heads, 2], scale and minimum."""

    attention: ClassVar[AttentionBackend | None] = GROUPED

    def __init__(
        self, layout: CacheLayout, limits: Limits, dtype: torch.dtype, device: torch.device, num_layers: int
    ) -> None:
        if layout.block_tokens % GROUP:
            raise InvalidInput(
                f"KV int4 needs blocks of a multiple of {GROUP} tokens, not {layout.block_tokens}",
                field="block_tokens",
                remedy=f"set it to {GROUP}",
            )
        if layout.head_dim % 2:
            raise InvalidInput(f"KV int4 needs heads of an even size, not {layout.head_dim}", field="kv")
        heads, dim, tokens = layout.num_kv_heads, layout.head_dim, layout.block_tokens
        fields = {
            "codes": ((tokens, 2 * heads, dim // 2), torch.uint8),
            "key_scales": ((tokens // GROUP, heads, dim, 2), torch.float16),
            "value_scales": ((tokens, heads, 2), torch.float16),
        }
        super().__init__(layout, limits.num_blocks, fields)
        self._staged = torch.zeros(num_layers, limits.max_num_seqs, GROUP, heads, dim, dtype=dtype)
        self.staging_bytes = self._staged.nbytes
        self.steps: list[_Step] = []
        self._groups = StagedGroups(layout, limits.max_num_seqs, limits.num_blocks)
        self._num_groups = layout.num_groups

    def layer(self, layer: int, slot: int, group: int) -> Int4Layer:
        codes, key_scales, value_scales = (self.fields[f][slot] for f in ("codes", "key_scales", "value_scales"))
        return Int4Layer(self, group, self._staged[layer], codes, key_scales, value_scales)

    def begin(self, batch: Batch) -> None:
        self.steps = [self._step(batch, group) for group in range(self._num_groups)]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        super().copy(sources, targets)
        self._groups.copied(targets)

    def _step(self, batch: Batch, group: int) -> _Step:
        slots, starts, table = batch.slots, batch.starts, batch.tables[group]
        ends = starts + batch.lengths
        restored = np.flatnonzero(self._groups.begin(group, slots, starts, batch.lengths, table))
        owners, indices, firsts = touched_groups(starts, batch.lengths, GROUP)
        at = np.minimum(indices[:, None] * GROUP + np.arange(GROUP), ends[owners][:, None] - 1)
        own_rows = batch.first_rows[owners][:, None] + at - starts[owners][:, None]
        earlier = len(batch.positions) + owners[:, None] * GROUP + np.arange(GROUP)
        sources = np.where(at >= starts[owners][:, None], own_rows, earlier)
        places = group_places(table, owners, indices, batch.block_tokens, GROUP)
        last = np.append(firsts[1:], len(owners)) - 1
        return _Step(
            slots=torch.from_numpy(slots),
            sources=torch.from_numpy(sources.reshape(-1)),
            places=torch.from_numpy(places),
            last=torch.from_numpy(last),
            restored_slots=torch.from_numpy(slots[restored]),
            restored_places=torch.from_numpy(
                group_places(table, restored, starts[restored] // GROUP, batch.block_tokens, GROUP)
            ),
        )


class Int4Layer:
    """One layer's keys and values; see `headrace.engine.attention._grouped.GroupedLayer`."""

    def __init__(
        self,
        pool: Int4Pool,
        group: int,
        staged: torch.Tensor,
        codes: torch.Tensor,
        key_scales: torch.Tensor,
        value_scales: torch.Tensor,
    ) -> None:
        self.num_kv_heads = heads = codes.shape[2] // 2
        self._pool = pool
        self._group = group
        self._staged = staged  # [slots, GROUP, kv_heads, head_dim]
        self._codes, self._key_scales, self._value_scales = codes, key_scales, value_scales
        in_groups = codes.view(-1, GROUP, *codes.shape[2:])
        self._key_codes, self._value_codes = in_groups[:, :, :heads], in_groups[:, :, heads:]
        self._scales_of_groups = key_scales.flatten(0, 1)
        self._scales_of_values = value_scales.view(-1, GROUP, heads, 2)
        self._token_values = codes.flatten(0, 1)[:, heads:]
        self._token_scales = value_scales.flatten(0, 1)
        self._own = torch.empty(0)

    def write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        step, heads = self._pool.steps[self._group], self.num_kv_heads
        vectors = kv.view(-1, 2 * heads, self._staged.shape[-1])
        keys, values = vectors[:, :heads], vectors[:, heads:]
        if len(step.restored_slots):
            stored = self._keys(step.restored_places, self._staged.dtype)
            self._staged.index_copy_(0, step.restored_slots, stored)
        staged = self._staged.index_select(0, step.slots)
        own = torch.cat([keys, staged.flatten(0, 1)]).index_select(0, step.sources)
        self._own = own = own.view(-1, GROUP, *own.shape[1:])
        self._staged.index_copy_(0, step.slots, own.index_select(0, step.last))
        # One bad token must not spoil the group's scales, and with them the tokens that others may have copied: its row
        # fails by the staged key, which is seen as it is.
        codes, scales = quantized(own.float().nan_to_num(0.0).clamp(-LARGEST, LARGEST), 1)
        self._key_codes.index_copy_(0, step.places, codes)
        self._scales_of_groups.index_copy_(0, step.places, scales)
        codes, scales = quantized(values.float(), -1)
        self._token_values.index_copy_(0, slots, codes)
        self._token_scales.index_copy_(0, slots, scales)
        values.copy_(dequantized(codes, scales, -1, torch.float32))

    def gather(self, blocks: torch.Tensor, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        heads = self.num_kv_heads
        codes = self._codes.index_select(0, blocks)
        in_groups = codes.view(-1, GROUP, *codes.shape[2:])
        key_scales = self._key_scales.index_select(0, blocks).flatten(0, 1)
        value_scales = self._value_scales.index_select(0, blocks)
        keys = dequantized(in_groups[:, :, :heads], key_scales, 1, dtype)
        values = dequantized(codes[:, :, heads:], value_scales, -1, dtype)
        return spread(torch.cat([keys.view_as(values), values], 2), rows, heads)

    def own(self, groups: torch.Tensor, places: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys as computed and values as stored, [groups, kv_heads, GROUP, head_dim], of groups that this step touches:
        `groups` counts them in the step's order, `places` in the pool."""
        codes = self._value_codes.index_select(0, places)
        values = dequantized(codes, self._scales_of_values.index_select(0, places), -1, dtype)
        return self._own.index_select(0, groups).transpose(1, 2), values.transpose(1, 2)

    def _keys(self, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Keys of whole groups as the pool has them, [groups, GROUP, kv_heads, head_dim]."""
        return dequantized(
            self._key_codes.index_select(0, places), self._scales_of_groups.index_select(0, places), 1, dtype
        )


def quantized(x: torch.Tensor, shared: int) -> tuple[torch.Tensor, torch.Tensor]:
    """4-bit codes of fp32 numbers [..., dim], packed to [..., dim / 2], and fp16 scales and minima [..., 2] of what shares them:
    the numbers along dimension `shared`, which they lack. Rounded by both as they are stored."""
    least = x.amin(shared).half()
    scale = ((x.amax(shared) - least.float()).clamp_min(0) / LEVELS).half()
    below, step = least.float().unsqueeze(shared), scale.float().unsqueeze(shared)
    codes = ((x - below) / torch.where(step == 0, 1.0, step)).round_().clamp_(0, LEVELS).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, torch.stack([scale, least], -1)


def dequantized(codes: torch.Tensor, scales: torch.Tensor, shared: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers [..., dim] again."""
    wide = torch.stack([codes & LEVELS, codes >> 4], -1).flatten(-2).to(dtype)
    step, least = scales.to(dtype).unbind(-1)
    return wide.mul_(step.unsqueeze(shared)).add_(least.unsqueeze(shared))


FORMAT = Int4Pool
