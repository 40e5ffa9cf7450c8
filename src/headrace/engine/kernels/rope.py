"""QK-norm, rotary embedding and the write into the paged cache, in one pass over the fused projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.engine.kernels.codes import INT4, INT8, PLAIN, coded, geometry
from headrace.engine.kernels.groups import put_values
from headrace.engine.kernels.launchers import power_of_2


@triton.jit
def rotated(base, at, inside, norm, cos_sin, eps, D: tl.constexpr, ROPE_DIM: tl.constexpr, NORM: tl.constexpr):
    """Heads at `base` (pointers [rows, 1] to their first element) normalized and rotated, fp32 [rows, dims].

    `at` [1, dims]; `cos_sin` points at the row of one position: ROPE_DIM / 2 cosines, then as many sines. The partner of a
    dimension is loaded a second time, which costs less than moving it between threads.
    """
    values = tl.load(base + at, inside, 0.0).to(tl.float32)
    if NORM:
        shrink = tl.rsqrt(tl.sum(values * values, 1) / D + eps)[:, None]
        values = values * shrink * tl.load(norm + at, at < D, 0.0).to(tl.float32)
    if ROPE_DIM > 0:
        half: tl.constexpr = ROPE_DIM // 2
        turning = at < ROPE_DIM
        partner = tl.where(at < half, at + half, at - half)
        other = tl.load(base + partner, inside & turning, 0.0).to(tl.float32)
        if NORM:
            other = other * shrink * tl.load(norm + partner, turning, 0.0).to(tl.float32)
        pair = tl.where(at < half, at, at - half)
        cos = tl.load(cos_sin + pair, turning, 1.0)
        sin = tl.load(cos_sin + half + pair, turning, 0.0)
        values = values * cos + tl.where(at < half, -other, other) * sin
    return values


@triton.jit
def put_token(
    k, v, kv, scales, block, token, heads, d, inside, KV_HEADS: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
    CODE: tl.constexpr,
):  # fmt: skip
    """Store keys and values [heads, dims] of one token in its block, `block` elements from the cache's begin; returns them as
    the cache will give them back. Those of codes are rounded to the type of v first."""
    at = heads * BT + token
    if CODE == PLAIN:
        k, v = k.to(kv.dtype.element_ty), v.to(kv.dtype.element_ty)
        target = kv + block + at[:, None] * D + d[None, :]
        tl.store(target, k, inside)
        tl.store(target + KV_HEADS * BT * D, v, inside)
    else:
        k_codes, k_scales, k = coded(k.to(v.dtype).to(tl.float32), CODE)
        v_codes, v_scales, v = coded(v.to(tl.float32), CODE)
        target = kv.to(tl.pointer_type(tl.int8), bitcast=True) + 2 * block + at[:, None] * D + d[None, :]
        tl.store(target, k_codes, inside)
        tl.store(target + KV_HEADS * BT * D, v_codes, inside)
        if CODE == INT8:
            there = tl.max(inside.to(tl.int32), 1) > 0
            tl.store(scales + block + at, k_scales, there)
            tl.store(scales + block + KV_HEADS * BT + at, v_scales, there)
    return k, v


@triton.jit
def _rope_cache(
    qkv, kv, scales, tables, slots, positions, q_norm, k_norm, cos_sin, eps, qkv_stride, table_stride, block_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS_P: tl.constexpr, KV_HEADS_P: tl.constexpr, D: tl.constexpr,
    D_P: tl.constexpr, BT: tl.constexpr, ROPE_DIM: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
    CODE: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row)
    if slot >= 0:
        d = tl.arange(0, D_P)
        at = d[None, :]
        turn = cos_sin + position.to(tl.int64) * ROPE_DIM
        first = qkv + row * qkv_stride
        head = tl.arange(0, HEADS_P)[:, None]
        inside = (head < HEADS) & (at < D)
        base = first + head * D
        q = rotated(base, at, inside, q_norm, turn, eps, D, ROPE_DIM, NORM)
        kv_heads = tl.arange(0, KV_HEADS_P)
        kv_head = kv_heads[:, None]
        kv_inside = (kv_head < KV_HEADS) & (at < D)
        k_base = first + (HEADS + kv_head) * D
        dtype = qkv.dtype.element_ty
        k = rotated(k_base, at, kv_inside, k_norm, turn, eps, D, ROPE_DIM, NORM).to(dtype)
        v_base = first + (HEADS + KV_HEADS + kv_head) * D
        v = tl.load(v_base + at, kv_inside, 0.0)
        page = tl.load(tables + slot * table_stride + position // BT).to(tl.int64)
        stored = kv_inside & (page >= 0)
        if CODE == INT4:
            # Keys are coded by groups, and seen as they are from inside their own.
            k_seen = k
            v_seen = put_values(
                v, kv, scales, page * block_stride, position % BT, kv_heads, stored, KV_HEADS, D, D_P, BT
            )
        else:
            k_seen, v_seen = put_token(
                k, v, kv, scales, page * block_stride, position % BT, kv_heads, d, stored, KV_HEADS, D, BT, CODE
            )
        tl.debug_barrier()  # partners were read from the places written now
        tl.store(base + at, q.to(dtype), inside)
        if CODE == PLAIN:
            tl.store(k_base + at, k, kv_inside)
        else:
            # A prompt sees its own tokens as later steps will.
            tl.store(k_base + at, k_seen.to(dtype), kv_inside)
            tl.store(v_base + at, v_seen.to(dtype), kv_inside)


def rope_cache(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    heads: int,
    *,
    rope_dim: int,
    scales: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> None:
    """Normalize and rotate queries and keys of `qkv` [tokens, (heads + 2 kv_heads) * dim] in place; store keys and values.

    `kv`, `scales`: see `headrace.engine.kernels.codes.geometry`; where they are codes, `qkv` then holds what these mean, but for keys of
    INT4, which `headrace.engine.kernels.groups.code_groups` stores. `tables` [slots, blocks of a sequence]; rows with slot -1 are
    left alone. `cos_sin` fp32 [positions, rope_dim].
    """
    code, kv_heads, block_tokens, dim = geometry(kv, scales)
    tiles = power_of_2(heads) * power_of_2(dim)
    _rope_cache[(len(qkv),)](
        qkv, kv, kv if scales is None else scales, tables, slots, positions,
        cos_sin if q_norm is None else q_norm, cos_sin if k_norm is None else k_norm, cos_sin, eps,
        qkv.stride(0), tables.stride(0), kv.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, HEADS_P=power_of_2(heads),
        KV_HEADS_P=power_of_2(kv_heads), D=dim, D_P=power_of_2(dim), BT=block_tokens,
        ROPE_DIM=rope_dim, NORM=q_norm is not None, PDL=pdl, CODE=code,
        num_warps=4 if tiles >= 1024 else 1, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
