"""Keys of 4 bits: whose scales a group of neighbouring tokens shares, so they are staged until the group is full.

A step's keys lie in its projection, those of an unfinished group that earlier steps computed are *staged*, [slots, kv_heads,
KEY_GROUP, dim] per layer, as they were computed. From both the codes and scales of every group that the step touches are made anew,
which keeps a block whole at any time: it can be copied, and be staged from again. Attention sees the keys of a query's own
group as they were computed and those of earlier groups by their codes, whoever computed them and when; see
`headrace.engine.kv_formats.int4`, whose codes and scales these are, byte for byte.

A sequence's rows of a step follow each other in the order of positions, and it has no others; so which tokens of a group are
among them can be told from the rows' slots, and steps need no further indices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.engine.kernels.codes import (
    KEY_GROUP,
    VALUE_UNIT,
    coded_along,
    geometry,
    halves,
    nibbles,
    packed,
    whole,
)
from headrace.engine.kernels.launchers import power_of_2

LARGEST = tl.constexpr(65504.0)
"""Larger keys are coded as this, and what is no number as 0: one bad token must not spoil its group's scales."""


@triton.jit
def put_values(
    v, kv, scales, block, token, heads, inside, KV_HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Store the values [heads, dims] of one token; returns in fp32 what the cache will give back. `block` elements from the
    cache's begin; all of it is left out where `inside` is false."""
    x = v.to(tl.float32)
    d = tl.arange(0, D_P)
    w = tl.arange(0, D_P // 4)
    codes, scale, least = coded_along(x, d[None, :] < D, 1)
    lost = tl.max((x != x).to(tl.int32), 1) > 0
    scale = tl.where(lost, float("nan"), scale)
    least = tl.where(lost, float("nan"), least)
    at = heads * BT + token
    there = tl.max(inside.to(tl.int32), 1) > 0
    target = kv + block + (KV_HEADS * BT + at)[:, None] * (D // 4) + w[None, :]
    tl.store(target, packed(codes), there[:, None] & (w[None, :] < D // 4))
    tl.store(scales + block + 2 * at, scale, there)
    tl.store(scales + block + 2 * at + 1, least, there)
    return codes.to(tl.float32) * scale.to(tl.float32)[:, None] + least.to(tl.float32)[:, None]


@triton.jit
def key_scales_at(scales, block, kv_head, token, KV_HEADS: tl.constexpr, D: tl.constexpr, BT: tl.constexpr):
    """Where scale and minimum of the first dimension of a token's group lie; `token` is counted in its block."""
    return scales + block + 2 * KV_HEADS * BT + (token // KEY_GROUP * KV_HEADS + kv_head) * (2 * D)


@triton.jit(do_not_specialize=["rows"])
def _code_groups(
    qkv, kv, scales, staged, tables, slots, positions, rows, qkv_stride, table_stride, block_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row)
    within = position % KEY_GROUP
    last = tl.load(slots + row + 1, row + 1 < rows, -1) != slot
    page = -1
    # A group's codes are made by its last row in the step.
    if (slot >= 0) & (last | (within == KEY_GROUP - 1)):
        page = tl.load(tables + slot * table_stride + position // BT)
    if page >= 0:
        d = tl.arange(0, D_P)
        w = tl.arange(0, D_P // 4)
        i = tl.arange(0, KEY_GROUP)
        # A token that is not there yet repeats the last one.
        at = tl.minimum(i, within)
        source = row - within + at
        own = tl.load(slots + source, source >= 0, -1) == slot
        d_inside = d[None, :] < D
        from_row = qkv + source.to(tl.int64)[:, None] * qkv_stride + (HEADS + kv_head) * D + d[None, :]
        place = staged + ((slot * KV_HEADS + kv_head) * KEY_GROUP + at)[:, None] * D + d[None, :]
        new = tl.load(from_row, own[:, None] & d_inside, 0.0)
        old = tl.load(place, (own == 0)[:, None] & d_inside, 0.0)
        before = row - within - 1
        begins_here = tl.load(slots + before, before >= 0, -1) != slot
        if last & begins_here:
            # Nobody reads what is staged of this group's new tokens. If the step began in an earlier group, that one is still
            # wanted where this one is to be staged (`stage_keys`).
            tl.store(place, new, (own & (i <= within))[:, None] & d_inside)
        x = tl.where(own[:, None], new.to(tl.float32), old.to(tl.float32))
        x = tl.where(x != x, 0.0, x)
        x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
        codes, scale, least = coded_along(x, i[:, None] < KEY_GROUP, 0)
        block = page.to(tl.int64) * block_stride
        token = position % BT - within
        words = kv + block + (kv_head * BT + token + i)[:, None] * (D // 4) + w[None, :]
        tl.store(words, packed(codes), (i[:, None] < KEY_GROUP) & (w[None, :] < D // 4))
        scale_at = key_scales_at(scales, block, kv_head, token, KV_HEADS, D, BT) + 2 * d
        tl.store(scale_at, scale, d < D)
        tl.store(scale_at + 1, least, d < D)


@triton.jit(do_not_specialize=["rows"])
def _stage_keys(
    qkv, staged, slots, positions, rows, qkv_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KV_HEADS_P: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    within = tl.load(positions + row) % KEY_GROUP
    next_group = row + KEY_GROUP - within
    if (slot >= 0) & (tl.load(slots + next_group, next_group < rows, -1) != slot):
        h = tl.arange(0, KV_HEADS_P)[:, None]
        d = tl.arange(0, D_P)[None, :]
        inside = (h < KV_HEADS) & (d < D)
        keys = tl.load(qkv + row.to(tl.int64) * qkv_stride + (HEADS + h) * D + d, inside, 0.0)
        tl.store(staged + ((slot * KV_HEADS + h) * KEY_GROUP + within) * D + d, keys, inside)


@triton.jit
def _restage_keys(
    kv, scales, staged, groups, block_stride, KV_HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    slot = tl.load(groups + 2 * tl.program_id(0)).to(tl.int64)
    group = tl.load(groups + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1)
    block = (group // (BT // KEY_GROUP)).to(tl.int64) * block_stride
    token = group % (BT // KEY_GROUP) * KEY_GROUP
    i = tl.arange(0, KEY_GROUP)[:, None]
    d = tl.arange(0, D_P)
    inside = (i < KEY_GROUP) & (d[None, :] < D)
    words = tl.load(kv + block + (kv_head * BT + token + i) * (D // 4) + d[None, :] // 4, inside, 0)
    codes = (words.to(tl.int32) >> (4 * (d[None, :] % 4))) & 15
    scale_at = key_scales_at(scales, block, kv_head, token, KV_HEADS, D, BT) + 2 * d
    dtype = staged.dtype.element_ty
    step = tl.load(scale_at, d < D, 0.0).to(dtype).to(tl.float32)
    least = tl.load(scale_at + 1, d < D, 0.0).to(dtype).to(tl.float32)
    keys = (codes.to(tl.float32) * step[None, :]).to(dtype).to(tl.float32) + least[None, :]
    tl.store(staged + ((slot * KV_HEADS + kv_head) * KEY_GROUP + i) * D + d[None, :], keys.to(dtype), inside)


@triton.jit
def coded_scores(
    first, second, third, fourth, kv, scales, block, kv_head, token,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Products of queries, given as their quarters, with the coded keys of the group whose first token is `token` of its block."""
    w = tl.arange(0, D_P // 4)
    i = tl.arange(0, KEY_GROUP)
    at = kv + block + (kv_head * BT + token + i)[None, :] * (D // 4) + w[:, None]
    words = tl.load(at, (i[None, :] < KEY_GROUP) & (w[:, None] < D // 4), 0)
    pairs = key_scales_at(scales, block, kv_head, token, KV_HEADS, D, BT).to(tl.pointer_type(tl.int32), bitcast=True)
    pairs += 4 * w
    there = w < D // 4
    scores = tl.dot(first, _keys(words, pairs, there, 0, first.dtype), input_precision="ieee")
    scores = tl.dot(second, _keys(words, pairs, there, 1, first.dtype), scores, input_precision="ieee")
    scores = tl.dot(third, _keys(words, pairs, there, 2, first.dtype), scores, input_precision="ieee")
    return tl.dot(fourth, _keys(words, pairs, there, 3, first.dtype), scores, input_precision="ieee")


@triton.jit
def _keys(words, pairs, there, AT: tl.constexpr, DTYPE: tl.constexpr):
    step, least = halves(tl.load(pairs + AT, there, 0))
    return nibbles(words, AT, 0.0, DTYPE) * step.to(DTYPE)[:, None] + least.to(DTYPE)[:, None]


@triton.jit
def add_values(
    weights, shrink, first, second, third, fourth, rest, kv, scales, block, kv_head, token, there,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, BT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Values of the tokens from `token` of a block on, those `there`, by their weights into the quarters of an accumulator in
    `VALUE_UNIT`; `rest` [queries] gets what is the same for all dimensions."""
    w = tl.arange(0, D_P // 4)
    i = tl.arange(0, KEY_GROUP)
    both = tl.load(scales.to(tl.pointer_type(tl.int32), bitcast=True) + block // 2 + kv_head * BT + token + i, there, 0)
    step, least = halves(both)
    # Codes from -8 to 7 make smaller products than codes from 0 to 15.
    middle = least.to(tl.float32) + 8.0 * step.to(tl.float32)
    rest = rest * shrink + tl.sum(weights * middle[None, :], 1)
    shares = (weights * (step.to(tl.float32) * VALUE_UNIT)[None, :]).to(DTYPE)
    at = kv + block + ((KV_HEADS + kv_head) * BT + token + i)[:, None] * (D // 4) + w[None, :]
    words = tl.load(at, there[:, None] & (w[None, :] < D // 4), 0)
    first = tl.dot(shares, nibbles(words, 0, 8.0, DTYPE), first * shrink[:, None], input_precision="ieee")
    second = tl.dot(shares, nibbles(words, 1, 8.0, DTYPE), second * shrink[:, None], input_precision="ieee")
    third = tl.dot(shares, nibbles(words, 2, 8.0, DTYPE), third * shrink[:, None], input_precision="ieee")
    fourth = tl.dot(shares, nibbles(words, 3, 8.0, DTYPE), fourth * shrink[:, None], input_precision="ieee")
    return first, second, third, fourth, rest


@triton.jit
def no_values(M: tl.constexpr, D_P: tl.constexpr):
    """What `add_values` begins with."""
    zeros = tl.zeros([M, D_P // 4], tl.float32)
    return zeros, zeros, zeros, zeros, tl.zeros([M], tl.float32)


@triton.jit
def all_values(first, second, third, fourth, rest):
    return whole(first, second, third, fourth) * (1.0 / VALUE_UNIT) + rest[:, None]


def code_groups(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor,
    staged: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    heads: int,
) -> None:
    """Codes and scales of the keys of every group that the rows of `qkv` touch, after `rope_cache`.

    Keys of sequences whose rows all lie in one group are staged too; of the others `stage_keys` does so, after attention has read
    what was staged before. `kv`, `scales`: see `headrace.engine.kernels.codes.geometry`. `staged` [slots, kv_heads, KEY_GROUP, dim].
    """
    _, kv_heads, block_tokens, dim = geometry(kv, scales)
    _code_groups[(len(qkv), kv_heads)](
        qkv, kv, scales, staged, tables, slots, positions, len(qkv), qkv.stride(0), tables.stride(0), kv.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, D=dim, D_P=power_of_2(dim), BT=block_tokens, num_warps=4,
    )  # fmt: skip


def stage_keys(
    qkv: torch.Tensor, staged: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, heads: int
) -> None:
    """Stage the keys of each sequence's last group that are among the rows of `qkv`."""
    _, kv_heads, _, dim = staged.shape
    _stage_keys[(len(qkv),)](
        qkv, staged, slots, positions, len(qkv), qkv.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, KV_HEADS_P=power_of_2(kv_heads), D=dim, D_P=power_of_2(dim), num_warps=4,
    )  # fmt: skip


def restage_keys(kv: torch.Tensor, scales: torch.Tensor, staged: torch.Tensor, groups: torch.Tensor) -> None:
    """Stage what the codes of groups say; `groups` [n, 2] int32: the slot, and the group's place among all of the pool."""
    _, kv_heads, block_tokens, dim = geometry(kv, scales)
    _restage_keys[(len(groups), kv_heads)](
        kv, scales, staged, groups, kv.stride(0), KV_HEADS=kv_heads, D=dim, D_P=power_of_2(dim), BT=block_tokens, num_warps=4,
    )  # fmt: skip
