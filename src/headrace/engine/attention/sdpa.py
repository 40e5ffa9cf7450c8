"""torch's scaled dot product attention over gathered blocks, a few calls per layer for any mix of sequences.

Single queries in fp32 on the CPU, most of a server's rows, read the pool in place (`_in_place`). The others form *buckets* of
sequences of similar shape, each computed by one call, padded to the bucket's longest; how to cut a batch into buckets is
chosen by a small cost model. Three kinds of bucket:
* decode (one query each): the query heads of a KV head become rows of one product, so a key is read once per group; where
  sequences share their first blocks, these are read once for all of them and the two parts joined by their log-sums;
* fresh (nothing in the cache yet): the step's own keys, causal, no gather and no mask;
* cached (several queries after a cached prefix): gathered keys and an explicit mask.
Soft caps and sinks, which torch's kernel does not know, take the same buckets through plain products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from headrace.engine.attention._contract import AttentionKind, Layer, Spans
from headrace.engine.attention._in_place import InPlace, computes_in_place

_CALL_BYTES = 400_000
"""KV bytes whose reading takes as long as the extra calls of one more bucket (measured on two cores)."""
_MASK_ELEMENTS = 1 << 25
"""Largest mask of one bucket."""
_MAX_SIZES = 24
"""Distinct lengths considered when decode rows are cut into buckets."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """`rows` [sequences * queries] picks the queries (None: all rows in order); `real` [real rows] picks what is not
    padding of the result, `targets` where it goes. `blocks` flat [sequences * n], None for a fresh bucket. `shared`: blocks
    before these that all sequences of a decode bucket have in common and see whole."""

    sequences: int
    queries: int
    rows: torch.Tensor | None
    real: torch.Tensor | None
    targets: torch.Tensor | None
    blocks: torch.Tensor | None
    mask: torch.Tensor | None
    shared: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Prepared:
    kind: AttentionKind
    buckets: Sequence[_Bucket]
    in_place: InPlace | None


class SDPA:
    name = "sdpa"

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
        single = spans.lengths == 1
        fresh = ~single & (spans.starts == 0)
        cached = ~single & ~fresh
        buckets: list[_Bucket] = []
        maker = _BucketMaker(spans, kind, device, dtype)
        separate = np.flatnonzero(single)
        if kind.softcap is None and kind.sinks is None:
            families, separate = maker.families(separate)
            buckets.extend(maker.decode(members, common) for members, common in families)
        in_place = None
        if len(separate) and computes_in_place(kind, device, dtype, kv_dtype or dtype):
            in_place = InPlace(spans, kind, separate)
        else:
            buckets.extend(maker.decode(members) for members in maker.decode_groups(separate))
        buckets.extend(maker.fresh(members) for members in maker.similar(np.flatnonzero(fresh)))
        buckets.extend(maker.cached(members) for members in maker.similar(np.flatnonzero(cached)))
        return _Prepared(kind, buckets, in_place)

    def advance(self, prepared: _Prepared, spans: Spans) -> bool:
        return not prepared.buckets and prepared.in_place is not None and prepared.in_place.advance(spans)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Layer, prepared: _Prepared
    ) -> torch.Tensor:
        kind, buckets, in_place = prepared.kind, prepared.buckets, prepared.in_place
        if in_place is not None and in_place.rows is None:
            return in_place.attend(q, cache)
        if len(buckets) == 1 and buckets[0].rows is None:
            return _bucket(q, k, v, cache, kind, buckets[0])
        out = torch.empty(q.shape[0], kind.num_heads * kind.head_dim, dtype=q.dtype, device=q.device)
        for b in buckets:
            part = _bucket(q, k, v, cache, kind, b)
            if b.real is not None:
                part = part.index_select(0, b.real)
            out.index_copy_(0, b.targets, part)
        if in_place is not None:
            out.index_copy_(0, in_place.rows, in_place.attend(q.index_select(0, in_place.rows), cache))
        return out


def _bucket(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Layer, kind: AttentionKind, b: _Bucket
) -> torch.Tensor:
    """One bucket's output, [sequences * queries, heads * head_dim]."""
    dim, group = kind.head_dim, kind.num_heads // kind.num_kv_heads
    if b.rows is not None:
        q = q.index_select(0, b.rows)
    packed = b.queries == 1
    if packed:
        q = q.view(b.sequences, kind.num_kv_heads, group, dim)
    else:
        q = q.view(b.sequences, b.queries, kind.num_heads, dim).transpose(1, 2)
    if b.blocks is not None:
        keys, values = cache.gather(b.blocks, b.sequences, q.dtype)
    else:
        if b.rows is not None:
            k, v = k.index_select(0, b.rows), v.index_select(0, b.rows)
        shape = (b.sequences, b.queries, kind.num_kv_heads, dim)
        keys, values = k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)
    if b.shared is not None:
        out = _joined(q, keys, values, cache, kind, b)
    elif kind.softcap is None and kind.sinks is None:
        causal = b.mask is None and b.queries > 1
        out = F.scaled_dot_product_attention(
            q, keys, values, b.mask, is_causal=causal, scale=kind.scale, enable_gqa=not packed and group > 1
        )
    else:
        out = _products(q, keys, values, b, kind, packed)
    if not packed:
        out = out.transpose(1, 2)
    return out.reshape(b.sequences * b.queries, kind.num_heads * dim)


def _joined(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache: Layer, kind: AttentionKind, b: _Bucket
) -> torch.Tensor:
    """A packed decode bucket whose sequences share a prefix: attention over the prefix, once for all queries, and over the
    rest, weighted by each part's share of the softmax's denominator (the online softmax of two pieces)."""
    rows, kv_heads, group, dim = q.shape
    shared_keys, shared_values = cache.gather(b.shared, 1, q.dtype)
    queries = q.transpose(0, 1).reshape(1, kv_heads, rows * group, dim)
    before, before_log = _with_log_sum(queries, shared_keys, shared_values, None, scale=kind.scale)
    after, after_log = _with_log_sum(q, keys, values, b.mask, scale=kind.scale)
    before = before.view(kv_heads, rows, group, dim).transpose(0, 1)
    before_log = before_log.view(kv_heads, rows, group).transpose(0, 1)
    share = torch.sigmoid(before_log - after_log).unsqueeze(-1).to(q.dtype)
    return torch.lerp(after, before, share)


def _with_log_sum(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the logarithm of its denominator [rows, heads, queries]."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, attn_mask=mask, scale=scale)


def _products(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, b: _Bucket, kind: AttentionKind, packed: bool
) -> torch.Tensor:
    """The same as the kernel by plain products; the path of soft caps and sinks."""
    group = kind.num_heads // kind.num_kv_heads
    if not packed:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.matmul(q, keys.transpose(-1, -2)).float().mul_(kind.scale)
    if kind.softcap is not None:
        scores.div_(kind.softcap).tanh_().mul_(kind.softcap)
    if b.mask is not None:
        scores.add_(b.mask)
    elif b.queries > 1:
        hidden = torch.ones(b.queries, b.queries, dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden, float("-inf"))
    if kind.sinks is not None:
        # Heads lie in dimension 1 of an unpacked bucket and in dimensions 1 and 2 of a packed one.
        shape = (1, kind.num_kv_heads, group, 1) if packed else (1, kind.num_heads, 1, 1)
        sinks = kind.sinks.float().view(shape).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        scores = scores.softmax(-1)
    return torch.matmul(scores.to(values.dtype), values)


class _BucketMaker:
    """Cuts one step's sequences into buckets and builds their indices and masks."""

    def __init__(self, spans: Spans, kind: AttentionKind, device: torch.device, dtype: torch.dtype) -> None:
        self._s = spans
        self._window = kind.window
        self._device = device
        self._dtype = dtype
        self._ends = spans.starts + spans.lengths
        oldest = np.zeros_like(spans.starts)
        if kind.window is not None:
            oldest = np.maximum(spans.starts - kind.window + 1, 0)
        self._first_block = oldest // spans.block_tokens
        self._num_blocks = -(-self._ends // spans.block_tokens) - self._first_block
        block_bytes = 2 * kind.num_kv_heads * kind.head_dim * dtype.itemsize * spans.block_tokens
        self._call_blocks = max(1.0, _CALL_BYTES / block_bytes)
        self._num_rows = int(spans.lengths.sum())

    def families(self, members: Ints) -> tuple[list[tuple[Ints, int]], Ints]:
        """Sequences that share at least so many first blocks that reading them once pays for the extra calls, with the
        number of these blocks; and the members that are left."""
        found: list[tuple[Ints, int]] = []
        if len(members) < 2 or self._device.type != "cpu":
            return found, members
        whole = self._window is None or self._ends[members] <= self._window
        left = np.ones(len(members), bool)
        first = self._s.tables[members, 0]
        names, counts = np.unique(first, return_counts=True)
        for name in names[counts > 1].tolist():
            inside = (first == name) & whole
            family = members[inside]
            if len(family) < 2:
                continue
            # Each keeps a block of its own, so that neither part is ever empty.
            width = int(self._num_blocks[family].min()) - 1
            tables = self._s.tables[family, :width]
            common = int(np.logical_and.accumulate((tables == tables[0]).all(axis=0)).sum())
            if common * (len(family) - 1) > 2 * self._call_blocks:
                found.append((family, common))
                left &= ~inside
        return found, members[left]

    def decode_groups(self, members: Ints) -> list[Ints]:
        """Cut rows, sorted by length, where padding would cost more than another call: least total cost, by recursion."""
        if len(members) <= 1:
            return [members] if len(members) else []
        sizes = self._num_blocks[members]
        lo, hi = int(sizes.min()), int(sizes.max())
        if (hi - lo) * len(members) <= self._call_blocks:
            return [members]  # keeps the rows' order, which saves the index
        grain = max(1, -(-(hi - lo + 1) // _MAX_SIZES))
        rounded = hi - (hi - sizes) // grain * grain
        distinct, counts = np.unique(rounded, return_counts=True)
        starts = _cheapest_cuts(distinct.tolist(), counts.tolist(), self._call_blocks)
        if len(starts) == 1:
            return [members]
        edges = [int(distinct[s]) for s in starts[1:]]
        which = np.searchsorted(edges, rounded, side="right")
        return [members[which == g] for g in range(len(starts))]

    def similar(self, members: Ints) -> list[Ints]:
        """Group sequences with several queries whose lengths are close, so that little is padding."""
        groups: list[list[int]] = []
        order = sorted(members.tolist(), key=lambda i: (self._s.lengths[i], self._num_blocks[i]))
        for i in order:
            length, blocks = int(self._s.lengths[i]), int(self._num_blocks[i])
            if groups:
                g = groups[-1]
                shortest, fewest = int(self._s.lengths[g[0]]), min(int(self._num_blocks[j]) for j in g)
                most = max(blocks, *(int(self._num_blocks[j]) for j in g))
                size = (len(g) + 1) * length * most * self._s.block_tokens
                close = length <= shortest * 1.2 + 8 and most <= fewest * 1.2 + 2
                if close and size <= _MASK_ELEMENTS:
                    g.append(i)
                    continue
            groups.append([i])
        return [np.array(sorted(g), np.int64) for g in groups]

    def decode(self, members: Ints, common: int = 0) -> _Bucket:
        """One query per sequence; the first `common` blocks are the same for all of them."""
        shared = None
        if common:
            shared = torch.from_numpy(self._s.tables[members[0], :common].astype(np.int64))
        blocks, count = self._blocks(members, common)
        queries_at = self._s.starts[members]
        mask = self._mask(queries_at[:, None], self._keys_at(members, count, common))
        rows, _, targets = self._rows(members, 1)
        return _Bucket(len(members), 1, rows, None, targets, blocks, mask, shared)

    def fresh(self, members: Ints) -> _Bucket:
        longest = int(self._s.lengths[members].max())
        mask = None
        if self._window is not None and longest > self._window:
            at = np.arange(longest)
            mask = self._mask(at[None, :], at[None, :])
        rows, real, targets = self._rows(members, longest)
        return _Bucket(len(members), longest, rows, real, targets, None, mask)

    def cached(self, members: Ints) -> _Bucket:
        longest = int(self._s.lengths[members].max())
        blocks, count = self._blocks(members)
        # Padding queries repeat the last real one, so that each has a key to see.
        offsets = np.minimum(np.arange(longest)[None, :], self._s.lengths[members][:, None] - 1)
        mask = self._mask(self._s.starts[members][:, None] + offsets, self._keys_at(members, count))
        rows, real, targets = self._rows(members, longest)
        return _Bucket(len(members), longest, rows, real, targets, blocks, mask)

    def _keys_at(self, members: Ints, count: int, skipped: int = 0) -> Ints:
        first = (self._first_block[members] + skipped) * self._s.block_tokens
        return first[:, None] + np.arange(count * self._s.block_tokens)[None, :]

    def _blocks(self, members: Ints, skipped: int = 0) -> tuple[torch.Tensor, int]:
        """Blocks in sight of each member after the first `skipped`, padded with its own last one (whose content is
        finite), and their number."""
        count = int(self._num_blocks[members].max()) - skipped
        first = self._first_block[members] + skipped
        last = self._first_block[members] + self._num_blocks[members] - 1
        columns = np.minimum(first[:, None] + np.arange(count), last[:, None])
        ids = self._s.tables[members[:, None], columns].astype(np.int64)
        return torch.from_numpy(ids.reshape(-1)).to(self._device), count

    def _mask(self, queries_at: Ints, keys_at: Ints) -> torch.Tensor | None:
        """Additive mask [sequences, 1, queries, keys]; None if nothing is hidden."""
        q, k = queries_at[:, :, None], keys_at[:, None, :]
        seen = k <= q
        if self._window is not None:
            seen &= k > q - self._window
        if seen.all():
            return None
        mask = np.where(seen, np.float32(0), np.float32("-inf"))[:, None]
        return torch.from_numpy(mask).to(device=self._device, dtype=self._dtype)

    def _rows(
        self, members: Ints, queries: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        lengths, first = self._s.lengths[members], self._s.first_rows[members]
        offsets = np.arange(queries)[None, :]
        real = offsets < lengths[:, None]
        rows = (first[:, None] + np.minimum(offsets, lengths[:, None] - 1)).reshape(-1)
        if len(rows) == self._num_rows and np.array_equal(rows, np.arange(self._num_rows)):
            return None, None, None
        flat = real.reshape(-1)
        to = self._device
        kept = None if flat.all() else torch.from_numpy(np.flatnonzero(flat)).to(to)
        return torch.from_numpy(rows).to(to), kept, torch.from_numpy(rows[flat]).to(to)


def _cheapest_cuts(sizes: list[int], counts: list[int], call: float) -> list[int]:
    """Where buckets start when `counts[i]` rows need `sizes[i]` blocks (ascending) and a bucket costs rows * largest + call."""
    n = len(sizes)
    before = [0]
    for c in counts:
        before.append(before[-1] + c)
    best = [0.0] + [float("inf")] * n
    start_of = [0] * (n + 1)
    for end in range(1, n + 1):
        for start in range(end):
            cost = best[start] + (before[end] - before[start]) * sizes[end - 1] + call
            if cost < best[end]:
                best[end], start_of[end] = cost, start
    starts = []
    at = n
    while at:
        at = start_of[at]
        starts.append(at)
    return starts[::-1]


BACKEND = SDPA()
