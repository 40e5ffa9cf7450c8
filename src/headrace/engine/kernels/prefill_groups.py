"""Attention of prompt chunks over a cache of INT4: of a query's own group of tokens it sees the keys as they were computed, of
earlier groups, the chunk's own among them, those that the codes say.

The tiling is `headrace.engine.kernels.prefill`'s; what a tile's queries see of their own groups follows the coded keys. Values
are seen by their codes, so all of them are read from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.engine.kernels.codes import INT4, KEY_GROUP, geometry, padded_dim, quarters
from headrace.engine.kernels.decode import LOG2E
from headrace.engine.kernels.groups import add_values, all_values, coded_scores, no_values
from headrace.engine.kernels.prefill import tile_of, weighted


@triton.jit(do_not_specialize=["window"])
def _prefill_groups(
    qkv, out, kv, scales, staged, tables, chunks, tiles, sinks, scale, softcap, window,
    qkv_stride, table_stride, block_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr,
    BT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.program_id(1)
    m0, slot, start, length, row0 = tile_of(tiles, chunks, tile)
    if m0 >= length:
        return
    kv_head = head // GROUP
    m = m0 + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_P)
    i = tl.arange(0, KEY_GROUP)
    inside = (m[:, None] < length) & (d[None, :] < D)
    q = tl.load(qkv + (row0 + m[:, None]) * qkv_stride + head * D + d[None, :], inside, 0.0)
    # Queries are multiplied with codes as fp16; see `headrace.engine.kernels.codes`.
    if q.dtype != tl.float32:
        q = q.to(tl.float16)
    q0, q1, q2, q3 = quarters(q)
    a0, a1, a2, a3, rest = no_values(BLOCK_M, D_P)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    positions = start + m
    own = positions // KEY_GROUP * KEY_GROUP
    end = start + tl.minimum(m0 + BLOCK_M, length)
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(start + m0 - window + 1, 0)
    table = tables + slot * table_stride

    for n0 in tl.range(
        oldest // KEY_GROUP * KEY_GROUP, (end - 1) // KEY_GROUP * KEY_GROUP, KEY_GROUP, num_stages=STAGES
    ):
        n = n0 + i
        block = tl.load(table + n0 // BT).to(tl.int64) * block_stride
        scores = coded_scores(q0, q1, q2, q3, kv, scales, block, kv_head, n0 % BT, KV_HEADS, D, D_P, BT)
        seen = (n[None, :] >= 0) & (n0 < own)[:, None]
        if WINDOW:
            seen = seen & (n[None, :] > positions[:, None] - window)
        weights, shrink, top = weighted(scores, seen, top, scale, softcap, True, SOFTCAP)
        total = total * shrink + tl.sum(weights, 1)
        a0, a1, a2, a3, rest = add_values(
            weights, shrink, a0, a1, a2, a3, rest, kv, scales, block, kv_head, n0 % BT, n >= oldest,
            KV_HEADS, D, D_P, BT, q.dtype,
        )  # fmt: skip

    # The groups that the tile's queries lie in: what earlier steps computed of the first one is staged.
    for n0 in tl.range((start + m0) // KEY_GROUP * KEY_GROUP, end, KEY_GROUP, num_stages=1):
        n = n0 + i
        block = tl.load(table + n0 // BT).to(tl.int64) * block_stride
        fresh = (n >= start) & (n < end)
        at = (row0 + n - start)[None, :] * qkv_stride + (HEADS + kv_head) * D + d[:, None]
        new = tl.load(qkv + at, fresh[None, :] & (d[:, None] < D), 0.0)
        place = (slot * KV_HEADS + kv_head) * (KEY_GROUP * D) + i[None, :] * D + d[:, None]
        old = tl.load(staged + place, (n < start)[None, :] & (d[:, None] < D), 0.0)
        k = tl.where(fresh[None, :], new, old).to(q.dtype)
        scores = tl.dot(q, k, input_precision="ieee")
        seen = (n0 == own)[:, None] & (n[None, :] <= positions[:, None])
        if WINDOW:
            seen = seen & (n[None, :] > positions[:, None] - window)
        weights, shrink, top = weighted(scores, seen, top, scale, softcap, True, SOFTCAP)
        total = total * shrink + tl.sum(weights, 1)
        a0, a1, a2, a3, rest = add_values(
            weights, shrink, a0, a1, a2, a3, rest, kv, scales, block, kv_head, n0 % BT, (n >= oldest) & (n < end),
            KV_HEADS, D, D_P, BT, q.dtype,
        )  # fmt: skip

    if SINKS:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2E - top)
    acc = all_values(a0, a1, a2, a3, rest)
    target = out + (row0 + m[:, None]) * (HEADS * D) + head * D + d[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), inside)


def prefill_groups(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor,
    staged: torch.Tensor,
    tables: torch.Tensor,
    chunks: torch.Tensor,
    tiles: torch.Tensor,
    heads: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    block_m: int = 64,
) -> None:
    """`headrace.engine.kernels.prefill.prefill_attention` of a cache of INT4, after `headrace.engine.kernels.groups.code_groups` and
    before `stage_keys`, for which see there."""
    code, kv_heads, block_tokens, dim = geometry(kv, scales)
    assert code == INT4.value
    _prefill_groups[(heads, len(tiles))](
        qkv, out, kv, scales, staged, tables, chunks, tiles, kv if sinks is None else sinks, scale, softcap or 0.0, window or 0,
        qkv.stride(0), tables.stride(0), kv.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, GROUP=heads // kv_heads, D=dim, D_P=padded_dim(code, dim), BT=block_tokens,
        WINDOW=window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None, BLOCK_M=block_m, STAGES=2,
        num_warps=4,
    )  # fmt: skip
