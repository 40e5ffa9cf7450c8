"""Attention of prompt chunks: FlashAttention's tiling over the keys of the cache, then over the chunk's own.

A tile of BLOCK_M queries of one head walks its keys in blocks of BLOCK_N. Keys before the chunk are read through the block
table; the chunk's own are still contiguous in the projection's output and are read there. Blocks wholly below the diagonal
need no mask. Bound by the tensor cores for chunks of some hundred tokens and more. A short chunk makes few tiles: where its
context is long, the cached keys of a tile are cut among programs, and the last one to finish merges what they found.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.engine.kernels.codes import (
    INT4,
    INT8,
    PLAIN,
    VALUE_UNIT,
    even,
    geometry,
    joined,
    odd,
    padded_dim,
    parts,
    scales_of,
)
from headrace.engine.kernels.decode import LOG2E, arrived_last, scored, split_range

HOPPER_TILE = 128
"""Queries of a tile, and keys of a block, of `prefill_hopper`; here, since that module needs a GPU's compiler."""


@triton.jit
def _advance(q, k, v, seen, acc, top, total, scale, softcap, MASK: tl.constexpr, SOFTCAP: tl.constexpr):
    """One block of keys k [dims, keys] and values v [keys, dims] into the online softmax."""
    scores = tl.dot(q, k, input_precision="ieee")
    weights, shrink, best = weighted(scores, seen, top, scale, softcap, MASK, SOFTCAP)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    total = total * shrink + tl.sum(weights, 1)
    return acc, best, total


@triton.jit
def weighted(scores, seen, top, scale, softcap, MASK: tl.constexpr, SOFTCAP: tl.constexpr):
    """Weights of a block by its scores, what the sums so far shrink by, and the new maximum."""
    if SOFTCAP:
        scores = scored(scores, scale, softcap, SOFTCAP)
        scale = 1.0
    else:
        scale = scale * LOG2E
    if MASK:
        scores = tl.where(seen, scores, float("-inf"))
    best = tl.maximum(top, tl.max(scores, 1) * scale)
    # A row that has seen nothing yet keeps -inf, whose differences would not be numbers.
    base = tl.where(best == float("-inf"), 0.0, best) if MASK else best
    shrink = tl.exp2(top - base)
    weights = tl.exp2(scores * scale - base[:, None])
    return weights, shrink, best


@triton.jit
def _over_codes(
    q, kv, scales, table, kv_head, positions, oldest, begin, stop, acc, top, total, scale, softcap, window, block_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, BT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """The cached keys and values [begin, stop) of a cache of codes; see `headrace.engine.kernels.codes`."""
    WORDS: tl.constexpr = D // 2
    w = tl.arange(0, D_P // 2)
    if q.dtype != tl.float32:
        q = q.to(tl.float16)
    q_even, q_odd = parts(q)
    acc_even, acc_odd = parts(acc)
    for n0 in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        there = n < stop
        if WINDOW:
            there = there & (n >= oldest)
        block = tl.load(table + n // BT, there, 0).to(tl.int64) * block_stride
        at = block + kv_head * (BT * WORDS) + (n % BT) * WORDS
        k = tl.load(kv + at[None, :] + w[:, None], there[None, :] & (w[:, None] < WORDS), 0)
        v = tl.load(kv + KV_HEADS * BT * WORDS + at[:, None] + w[None, :], there[:, None] & (w[None, :] < WORDS), 0)
        scores = tl.dot(q_even, even(k, CODE, q.dtype), input_precision="ieee")
        scores = tl.dot(q_odd, odd(k, CODE, q.dtype), scores, input_precision="ieee")
        if CODE == INT8:
            scores *= scales_of(scales, table, kv_head * BT, n0, oldest, stop, block_stride, BT, BLOCK_N)[None, :]
        seen = there[None, :]
        if WINDOW:
            seen = seen & (n[None, :] > positions[:, None] - window)
        weights, shrink, top = weighted(scores, seen, top, scale, softcap, True, SOFTCAP)
        total = total * shrink + tl.sum(weights, 1)
        if CODE == INT8:
            steps = scales_of(scales, table, (KV_HEADS + kv_head) * BT, n0, oldest, stop, block_stride, BT, BLOCK_N)
            weights *= (steps * VALUE_UNIT)[None, :]
        shares = weights.to(q.dtype)
        acc_even = tl.dot(shares, even(v, CODE, q.dtype), acc_even * shrink[:, None], input_precision="ieee")
        acc_odd = tl.dot(shares, odd(v, CODE, q.dtype), acc_odd * shrink[:, None], input_precision="ieee")
    acc = joined(acc_even, acc_odd)
    if CODE == INT8:
        acc *= 1.0 / VALUE_UNIT
    return acc, top, total


@triton.jit
def tile_of(tiles, chunks, tile):
    """A tile's first query in its chunk; the chunk's slot, cached tokens, length and first row."""
    chunk = tl.load(tiles + 2 * tile)
    m0 = tl.load(tiles + 2 * tile + 1)
    slot = tl.load(chunks + 4 * chunk).to(tl.int64)
    start = tl.load(chunks + 4 * chunk + 1)
    length = tl.load(chunks + 4 * chunk + 2)
    row0 = tl.load(chunks + 4 * chunk + 3).to(tl.int64)
    return m0, slot, start, length, row0


@triton.jit(do_not_specialize=["window", "splits", "split_tiles", "min_chunk"])
def _prefill(
    qkv, out, kv, scales, tables, chunks, tiles, sinks, partial, lse, counters, scale, softcap, window, splits, split_tiles,
    min_chunk, qkv_stride, table_stride, block_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr,
    BT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, EVEN_D: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.program_id(1)
    m0, slot, start, length, row0 = tile_of(tiles, chunks, tile)
    if m0 >= length:
        return
    kv_head = head // GROUP
    m = m0 + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_P)
    d_inside = d < D
    q_at = (row0 + m[:, None]) * qkv_stride + head * D + d[None, :]
    q = tl.load(qkv + q_at, (m[:, None] < length) & d_inside[None, :], 0.0)
    dtype = qkv.dtype.element_ty
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_P], tl.float32)
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(start + m0 - window + 1, 0)
    split = 0
    used = 1
    begin = oldest // BLOCK_N * BLOCK_N
    stop = start
    if SPLIT:
        split = tl.program_id(2)
        cut, used = split_range(begin, start, tl.where(tile < split_tiles, splits, 1), min_chunk, BLOCK_N)
        if split >= used:
            return
        begin += split * cut
        stop = tl.minimum(begin + cut, start)

    # Keys of earlier steps, in pages.
    page_size = BT * D
    if CODE == PLAIN:
        for n0 in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
            n = n0 + tl.arange(0, BLOCK_N)
            there = n < stop
            if WINDOW:
                there = there & (n >= oldest)
            page = tl.load(tables + slot * table_stride + n // BT, there, 0).to(tl.int64)
            at = page * block_stride + kv_head * page_size + (n % BT) * D
            k = tl.load(kv + at[None, :] + d[:, None], there[None, :] & d_inside[:, None], 0.0)
            v = tl.load(kv + KV_HEADS * page_size + at[:, None] + d[None, :], there[:, None] & d_inside[None, :], 0.0)
            seen = there[None, :]
            if WINDOW:
                seen = seen & (n[None, :] > start + m[:, None] - window)
            acc, top, total = _advance(
                q, k.to(dtype), v.to(dtype), seen, acc, top, total, scale, softcap, True, SOFTCAP
            )
    else:
        acc, top, total = _over_codes(
            q, kv, scales, tables + slot * table_stride, kv_head, start + m, oldest, begin, stop, acc, top, total,
            scale, softcap, window, block_stride, KV_HEADS, D, D_P, BT, WINDOW, SOFTCAP, BLOCK_N, STAGES, CODE,
        )  # fmt: skip

    # The chunk's own keys below the diagonal, contiguous.
    k_base = qkv + row0 * qkv_stride + (HEADS + kv_head) * D
    v_base = k_base + KV_HEADS * D
    fresh = 0
    if WINDOW:
        fresh = tl.maximum(m0 - window + 1, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(m0 + BLOCK_M, length)
    diagonal = m0
    if SPLIT:
        # They are the last part's.
        fresh = tl.where(split == used - 1, fresh, end)
        diagonal = tl.where(split == used - 1, m0, end)
    for n0 in tl.range(fresh, m0, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        at = n.to(tl.int64) * qkv_stride
        if EVEN_D:
            k = tl.load(k_base + at[None, :] + d[:, None])
            v = tl.load(v_base + at[:, None] + d[None, :])
        else:
            k = tl.load(k_base + at[None, :] + d[:, None], d_inside[:, None], 0.0)
            v = tl.load(v_base + at[:, None] + d[None, :], d_inside[None, :], 0.0)
        seen = n[None, :] >= 0
        if WINDOW:
            seen = n[None, :] > m[:, None] - window
        acc, top, total = _advance(q, k, v, seen, acc, top, total, scale, softcap, WINDOW, SOFTCAP)

    # The blocks that the diagonal crosses.
    for n0 in tl.range(diagonal, end, BLOCK_N, num_stages=1):
        n = n0 + tl.arange(0, BLOCK_N)
        at = n.to(tl.int64) * qkv_stride
        there = n < length
        k = tl.load(k_base + at[None, :] + d[:, None], there[None, :] & d_inside[:, None], 0.0)
        v = tl.load(v_base + at[:, None] + d[None, :], there[:, None] & d_inside[None, :], 0.0)
        seen = (n[None, :] <= m[:, None]) & there[None, :]
        if WINDOW:
            seen = seen & (n[None, :] > m[:, None] - window)
        acc, top, total = _advance(q, k, v, seen, acc, top, total, scale, softcap, True, SOFTCAP)

    target = out + (row0 + m[:, None]) * (HEADS * D) + head * D + d[None, :]
    inside = (m[:, None] < length) & d_inside[None, :]
    if used == 1:
        if SINKS:
            total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2E - top)
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), inside)
    elif SPLIT:
        first = (tile.to(tl.int64) * HEADS + head) * splits
        row = tl.arange(0, BLOCK_M)
        places = row[:, None] * D_P + d[None, :]
        # With a window, a part may hold no key that a row sees.
        total_safe = tl.where(total > 0.0, total, 1.0)
        tl.store(partial + (first + split) * (BLOCK_M * D_P) + places, acc / total_safe[:, None])
        found = tl.where(total > 0.0, top + tl.log2(total_safe), float("-inf"))
        tl.store(lse + (first + split) * BLOCK_M + row, found)
        tl.debug_barrier()
        if arrived_last(counters + tile * HEADS + head, used):
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, D_P], tl.float32)
            for s in range(used):
                part_lse = tl.load(lse + (first + s) * BLOCK_M + row, cache_modifier=".cg")
                part = tl.load(partial + (first + s) * (BLOCK_M * D_P) + places, cache_modifier=".cg")
                best = tl.maximum(top, part_lse)
                base = tl.where(best == float("-inf"), 0.0, best)
                shrink = tl.exp2(top - base)
                weight = tl.exp2(part_lse - base)
                acc = acc * shrink[:, None] + part * weight[:, None]
                total = total * shrink + weight
                top = best
            if SINKS:
                total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2E - top)
            tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), inside)


class PrefillWorkspace:
    """Parts of tiles whose keys are cut among programs; shared by all layers. Counters are zero between launches."""

    def __init__(self, tiles: int, splits: int, heads: int, block_m: int, dim: int, device: torch.device) -> None:
        """Room for `splits` parts of each of the first `tiles` tiles."""
        self.tiles, self.splits, self.block_m = tiles, splits, block_m
        parts = tiles * heads * splits * block_m
        dim_p = padded_dim(INT8.value, dim)
        self.partial = torch.empty(parts * dim_p, dtype=torch.float32, device=device)
        self.lse = torch.empty(parts, dtype=torch.float32, device=device)
        self.counters = torch.zeros(tiles * heads, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self.partial.nbytes + self.lse.nbytes + self.counters.nbytes


def prefill_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv: torch.Tensor,
    tables: torch.Tensor,
    chunks: torch.Tensor,
    tiles: torch.Tensor,
    heads: int,
    *,
    scale: float,
    scales: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    block_m: int = 128,
    block_n: int = 64,
    num_warps: int = 8,
    stages: int = 2,
    work: PrefillWorkspace | None = None,
    min_chunk: int = 1024,
) -> None:
    """out [tokens, heads * dim] for chunks of several sequences; rows of no chunk are left alone.

    `qkv` [tokens, (heads + 2 kv_heads) * dim] after `rope_cache`. `kv`, `scales`: see
    `headrace.engine.kernels.codes.geometry`. `chunks` [n, 4] int32: slot, first position, length, first row. `tiles` [t, 2]
    int32: chunk and the first query of each tile of `block_m` (a multiple of `block_n`) queries; a chunk of length 0 is padding.
    With `work` the cached keys of its first tiles are cut into parts of at least `min_chunk`.
    """
    code, kv_heads, block_tokens, dim = geometry(kv, scales)
    assert code != INT4.value  # `prefill_groups`
    assert block_m % block_n == 0
    assert work is None or work.block_m == block_m
    dim_p = padded_dim(code, dim)
    splits = 1 if work is None else work.splits
    places = (out, out, out) if work is None else (work.partial, work.lse, work.counters)
    _prefill[(heads, len(tiles), splits)](
        qkv, out, kv, kv if scales is None else scales, tables, chunks, tiles, kv if sinks is None else sinks, *places,
        scale, softcap or 0.0, window or 0,
        splits, 0 if work is None else work.tiles, min_chunk, qkv.stride(0), tables.stride(0), kv.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, GROUP=heads // kv_heads, D=dim, D_P=dim_p, BT=block_tokens,
        WINDOW=window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None, EVEN_D=dim == dim_p, SPLIT=work is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages, CODE=code, num_warps=num_warps,
    )  # fmt: skip
