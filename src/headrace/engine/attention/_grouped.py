"""Attention over a cache whose keys are quantized in groups of tokens: from inside a group its own keys are seen as they were
computed, those of earlier groups as they are stored. Decoding sequences share one call, a chunk of several tokens has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from headrace.engine.attention._contract import AttentionKind, Layer
from headrace.engine.batch import Spans
from headrace.engine.staging import group_places, touched_groups
from headrace.spec.precision import kv_precision

GROUP = kv_precision("int4").key_group

Ints = npt.NDArray[np.int64]

_CALL_ELEMENTS = 1 << 26
"""Most numbers of keys and values that are dequantized for one call of several sequences."""


class GroupedLayer(Layer, Protocol):
    """A layer's cache that can also give the groups which the step writes to; `gather` gives what is stored."""

    def own(self, groups: torch.Tensor, places: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys as computed and values as stored, [groups, kv_heads, GROUP, head_dim], of groups that this step touches:
        `groups` counts them in the step's order, `places` in the pool."""
        ...


@dataclass(frozen=True, slots=True)
class _Call:
    """`sequences` with `queries` rows each, at `rows` of the step. `blocks` [sequences * n] hold the context; `groups` and `places`
    [sequences * m] are their own groups; `mask` [sequences, 1, queries, n * block_tokens + m * GROUP], additive."""

    sequences: int
    queries: int
    rows: torch.Tensor
    blocks: torch.Tensor
    groups: torch.Tensor
    places: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prepared:
    kind: AttentionKind
    calls: Sequence[_Call]


class Grouped:
    name = "grouped"

    def unsupported(self, kind: AttentionKind, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def prepare(
        self,
        spans: Spans,
        kind: AttentionKind,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> _Prepared:
        maker = _CallMaker(spans, kind.window, device, dtype)
        row = 2 * kind.num_kv_heads * kind.head_dim
        calls = [maker.make(some) for some in maker.cut(np.flatnonzero(spans.lengths == 1), row)]
        calls += [maker.make(np.array([i])) for i in np.flatnonzero(spans.lengths > 1)]
        return _Prepared(kind, calls)

    def advance(self, prepared: _Prepared, spans: Spans) -> bool:
        return False

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: GroupedLayer, prepared: _Prepared
    ) -> torch.Tensor:
        kind = prepared.kind
        out = torch.empty(q.shape[0], kind.num_heads * kind.head_dim, dtype=q.dtype, device=q.device)
        for call in prepared.calls:
            out.index_copy_(0, call.rows, _attend(q.index_select(0, call.rows), cache, kind, call))
        return out


def _attend(q: torch.Tensor, cache: GroupedLayer, kind: AttentionKind, call: _Call) -> torch.Tensor:
    """One call's output, [sequences * queries, heads * head_dim]."""
    n, kv_heads, dim = call.sequences, kind.num_kv_heads, kind.head_dim
    own_keys, own_values = (
        part.view(n, -1, *part.shape[1:]).transpose(1, 2).flatten(2, 3)
        for part in cache.own(call.groups, call.places, q.dtype)
    )
    stored_keys, stored_values = cache.gather(call.blocks, n, q.dtype)
    keys, values = torch.cat([stored_keys, own_keys], 2), torch.cat([stored_values, own_values], 2)
    # The query heads of a KV head are rows of one product.
    group = kind.num_heads // kv_heads
    q = q.view(n, call.queries, kv_heads, group, dim).permute(0, 2, 1, 3, 4).reshape(n, kv_heads, -1, dim)
    mask = call.mask.repeat_interleave(group, 2)
    if kind.softcap is None and kind.sinks is None:
        out = F.scaled_dot_product_attention(q, keys, values, mask, scale=kind.scale)
    else:
        out = _products(q, keys, values, mask, kind, call.queries)
    return out.reshape(n, kv_heads, call.queries, group, dim).permute(0, 2, 1, 3, 4).reshape(n * call.queries, -1)


def _products(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, kind: AttentionKind, queries: int
) -> torch.Tensor:
    scores = torch.matmul(q, keys.transpose(-1, -2)).float().mul_(kind.scale)
    if kind.softcap is not None:
        scores.div_(kind.softcap).tanh_().mul_(kind.softcap)
    scores.add_(mask)
    if kind.sinks is None:
        shares = scores.softmax(-1)
    else:
        sinks = kind.sinks.float().view(1, kind.num_kv_heads, 1, -1).expand(-1, -1, queries, -1)
        sinks = sinks.reshape(1, kind.num_kv_heads, scores.shape[2], 1).expand(*scores.shape[:-1], 1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return torch.matmul(shares.to(values.dtype), values)


class _CallMaker:
    """Builds the indices and masks of one step's calls."""

    def __init__(self, spans: Spans, window: int | None, device: torch.device, dtype: torch.dtype) -> None:
        self._s = spans
        self._window = window
        self._device = device
        self._dtype = dtype
        _, self._indices, self._firsts = touched_groups(spans.starts, spans.lengths, GROUP)
        self._counts = np.diff(np.append(self._firsts, len(self._indices)))

    def cut(self, members: Ints, row: int) -> list[Ints]:
        """Single tokens by length of context, so many together that what is gathered for them, padded, stays bounded."""
        found: list[Ints] = []
        order = members[np.argsort(self._s.starts[members], kind="stable")]
        begin = 0
        for end in range(1, len(order) + 1):
            at_end = end == len(order)
            if at_end or (end + 1 - begin) * int(self._s.starts[order[end]] + 1) * row > _CALL_ELEMENTS:
                found.append(order[begin:end])
                begin = end
        return found

    def make(self, members: Ints) -> _Call:
        """One call for sequences of equal length that lie in equally many groups (single tokens, or one sequence)."""
        s, size = self._s, self._s.block_tokens
        queries, count = int(s.lengths[members[0]]), int(self._counts[members[0]])
        starts = s.starts[members]
        oldest = np.zeros_like(starts) if self._window is None else np.maximum(starts - self._window + 1, 0)
        first_block, last_block = oldest // size, (starts + queries - 1) // size
        width = int((last_block - first_block).max()) + 1
        columns = np.minimum(first_block[:, None] + np.arange(width), last_block[:, None])
        blocks = s.tables[members[:, None], columns].astype(np.int64)
        groups = self._firsts[members][:, None] + np.arange(count)
        indices = self._indices[groups]
        places = group_places(s.tables, members[:, None], indices, size, GROUP)
        rows = s.first_rows[members][:, None] + np.arange(queries)
        queries_at = starts[:, None] + np.arange(queries)
        stored_at = first_block[:, None] * size + np.arange(width * size)
        own_at = (indices[:, :, None] * GROUP + np.arange(GROUP)).reshape(len(members), -1)
        mask = np.concatenate(
            [self._seen(queries_at, stored_at, own=False), self._seen(queries_at, own_at, own=True)], 2
        )
        additive = np.where(mask, np.float32(0), np.float32("-inf"))[:, None]
        return _Call(
            sequences=len(members),
            queries=queries,
            rows=self._tensor(rows.reshape(-1)),
            blocks=self._tensor(blocks.reshape(-1)),
            groups=self._tensor(groups.reshape(-1)),
            places=self._tensor(places.reshape(-1)),
            mask=torch.from_numpy(additive).to(device=self._device, dtype=self._dtype),
        )

    def _seen(self, queries_at: Ints, keys_at: Ints, *, own: bool) -> npt.NDArray[np.bool_]:
        """[sequences, queries, keys]: keys of the query's own group up to itself, or of earlier groups."""
        q, k = queries_at[:, :, None], keys_at[:, None, :]
        seen = (k // GROUP == q // GROUP) & (k <= q) if own else k // GROUP < q // GROUP
        return seen if self._window is None else seen & (k > q - self._window)

    def _tensor(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


GROUPED = Grouped()
