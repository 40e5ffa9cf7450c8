"""Paged attention of one new token per sequence: split over the context, all query heads of a KV head in one tile.

Decode attention reads every cached key and value once, so it is bound by memory bandwidth: about one multiply-add per byte
and query head. Query heads that share a KV head are packed as rows of one tensor-core tile, so that keys are read once for
all of them. A long context is cut among up to `splits` programs; each keeps a running maximum, a sum and an accumulator
(the online softmax), and the last one to finish merges all of them by their log-sum-exp, which saves a second launch. Many
parts are merged in two levels: the last of each `SPAN` neighbours merges these, the last of those the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.engine.kernels.activation import tanh
from headrace.engine.kernels.codes import (
    INT4,
    INT8,
    KEY_GROUP,
    PLAIN,
    VALUE_UNIT,
    even,
    geometry,
    joined,
    odd,
    padded_dim,
    parts,
    quarters,
    scales_of,
)
from headrace.engine.kernels.groups import add_values, all_values, coded_scores, no_values
from headrace.engine.kernels.launchers import power_of_2
from headrace.engine.kernels.rope import put_token, rotated

LOG2E = tl.constexpr(1.4426950408889634)
SPAN = tl.constexpr(8)
"""Parts that are merged at once."""


@triton.jit
def scored(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores in units of log 2: scaled, and capped where the model caps them."""
    if SOFTCAP:
        return softcap * tanh(scores * (scale / softcap)) * LOG2E
    else:
        return scores * (scale * LOG2E)


@triton.jit
def split_range(low, end, splits, min_chunk, BLOCK_N: tl.constexpr):
    """How [low, end) is cut: keys per split and the number of splits that have any (at least 1)."""
    keys = tl.maximum(end - low, 0)
    chunk = tl.maximum(tl.cdiv(keys, splits), min_chunk)
    chunk = tl.cdiv(chunk, BLOCK_N) * BLOCK_N
    return chunk, tl.maximum(tl.cdiv(keys, chunk), 1)


@triton.jit
def over_pages(
    q, kv, scales, table, kv_head, begin, stop, acc, top, total, scale, softcap, block_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, BT: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """The cached keys and values [begin, stop) of a sequence, whose blocks `table` points at, into the online softmax of q."""
    if CODE == PLAIN:
        acc, top, total = over_numbers(
            q, kv, table, kv_head * (BT * D), begin, stop, acc, top, total, scale, softcap, block_stride,
            KV_HEADS, D, D_P, BT, SOFTCAP, BLOCK_N, STAGES,
        )  # fmt: skip
    elif CODE == INT4:
        acc, top, total = over_groups(
            q, kv, scales, kv, table, kv_head, begin, stop, stop, stop, top, total, scale, softcap, block_stride,
            KV_HEADS, D, D_P, BT, SOFTCAP, STAGES,
        )  # fmt: skip
    else:
        acc, top, total = over_codes(
            q, kv, scales, table, kv_head, begin, stop, acc, top, total, scale, softcap, block_stride,
            KV_HEADS, D, D_P, BT, SOFTCAP, BLOCK_N, STAGES, CODE,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def over_codes(
    q, kv, scales, table, kv_head, begin, stop, acc, top, total, scale, softcap, block_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, BT: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """`over_pages` of a cache of codes; see `headrace.engine.kernels.codes`."""
    WORDS: tl.constexpr = D // 2
    w = tl.arange(0, D_P // 2)
    q_even, q_odd = parts(q)
    if CODE == INT8:
        acc *= VALUE_UNIT
    acc_even, acc_odd = parts(acc)
    first = begin
    if CODE == INT8:
        first = begin // 2 * 2
    for n0 in tl.range(first, stop, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        seen = n < stop
        if CODE == INT8:
            seen = seen & (n >= begin)
        block = tl.load(table + n // BT, seen, 0).to(tl.int64) * block_stride
        at = block + kv_head * (BT * WORDS) + (n % BT) * WORDS
        k = tl.load(kv + at[None, :] + w[:, None], seen[None, :] & (w[:, None] < WORDS), 0)
        scores = tl.dot(q_even, even(k, CODE, q.dtype), input_precision="ieee")
        scores = tl.dot(q_odd, odd(k, CODE, q.dtype), scores, input_precision="ieee")
        if CODE == INT8:
            scores *= scales_of(scales, table, kv_head * BT, n0, begin, stop, block_stride, BT, BLOCK_N)[None, :]
        scores = tl.where(seen[None, :], scored(scores, scale, softcap, SOFTCAP), float("-inf"))
        best = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - best)
        weights = tl.exp2(scores - best[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if CODE == INT8:
            steps = scales_of(scales, table, (KV_HEADS + kv_head) * BT, n0, begin, stop, block_stride, BT, BLOCK_N)
            weights *= (steps * VALUE_UNIT)[None, :]
        shares = weights.to(q.dtype)
        v = tl.load(kv + KV_HEADS * BT * WORDS + at[:, None] + w[None, :], seen[:, None] & (w[None, :] < WORDS), 0)
        acc_even = tl.dot(shares, even(v, CODE, q.dtype), acc_even * shrink[:, None], input_precision="ieee")
        acc_odd = tl.dot(shares, odd(v, CODE, q.dtype), acc_odd * shrink[:, None], input_precision="ieee")
        top = best
    acc = joined(acc_even, acc_odd)
    if CODE == INT8:
        acc *= 1.0 / VALUE_UNIT
    return acc, top, total


@triton.jit
def over_groups(
    q, kv, scales, staged, table, kv_head, begin, stop, own, own_stop, top, total, scale, softcap, block_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, BT: tl.constexpr, SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`over_pages` of a cache of INT4, into an accumulator of zeros; see `headrace.engine.kernels.groups`.

    Besides, tokens [own, own_stop) of one group whose keys are staged, `staged` pointing at the KV head's.
    """
    M: tl.constexpr = q.shape[0]
    i = tl.arange(0, KEY_GROUP)
    q0, q1, q2, q3 = quarters(q)
    a0, a1, a2, a3, rest = no_values(M, D_P)
    for n0 in tl.range(begin // KEY_GROUP * KEY_GROUP, stop, KEY_GROUP, num_stages=STAGES):
        seen = (n0 + i >= begin) & (n0 + i < stop)
        block = tl.load(table + n0 // BT).to(tl.int64) * block_stride
        scores = coded_scores(q0, q1, q2, q3, kv, scales, block, kv_head, n0 % BT, KV_HEADS, D, D_P, BT)
        weights, shrink, top = _weighed(scores, seen, top, scale, softcap, SOFTCAP)
        total = total * shrink + tl.sum(weights, 1)
        a0, a1, a2, a3, rest = add_values(
            weights, shrink, a0, a1, a2, a3, rest, kv, scales, block, kv_head, n0 % BT, seen, KV_HEADS, D, D_P, BT, q.dtype,
        )  # fmt: skip
    d = tl.arange(0, D_P)[:, None]
    # Once or never.
    for n0 in tl.range(own // KEY_GROUP * KEY_GROUP, own_stop, KEY_GROUP, num_stages=1):
        seen = (n0 + i >= own) & (n0 + i < own_stop)
        block = tl.load(table + n0 // BT).to(tl.int64) * block_stride
        k = tl.load(staged + i[None, :] * D + d, seen[None, :] & (d < D), 0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        weights, shrink, top = _weighed(scores, seen, top, scale, softcap, SOFTCAP)
        total = total * shrink + tl.sum(weights, 1)
        a0, a1, a2, a3, rest = add_values(
            weights, shrink, a0, a1, a2, a3, rest, kv, scales, block, kv_head, n0 % BT, seen, KV_HEADS, D, D_P, BT, q.dtype,
        )  # fmt: skip
    return all_values(a0, a1, a2, a3, rest), top, total


@triton.jit
def _weighed(scores, seen, top, scale, softcap, SOFTCAP: tl.constexpr):
    """Weights of keys by their scores, what the sums so far shrink by, and the new maximum."""
    scores = tl.where(seen[None, :], scored(scores, scale, softcap, SOFTCAP), float("-inf"))
    best = tl.maximum(top, tl.max(scores, 1))
    return tl.exp2(scores - best[:, None]), tl.exp2(top - best), best


@triton.jit
def over_numbers(
    q, kv, table, head_at, begin, stop, acc, top, total, scale, softcap, block_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, BT: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`over_pages` of a cache of plain numbers; `head_at`: the KV head's place in a block."""
    d = tl.arange(0, D_P)
    for n0 in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        seen = n < stop
        page = tl.load(table + n // BT, seen, 0).to(tl.int64)
        at = page * block_stride + head_at + (n % BT) * D
        k = tl.load(kv + at[None, :] + d[:, None], seen[None, :] & (d[:, None] < D), 0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        scores = tl.where(seen[None, :], scored(scores, scale, softcap, SOFTCAP), float("-inf"))
        best = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - best)
        weights = tl.exp2(scores - best[:, None])
        v = tl.load(kv + KV_HEADS * BT * D + at[:, None] + d[None, :], seen[:, None] & (d[None, :] < D), 0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = best
    return acc, top, total


@triton.jit(
    do_not_specialize=["splits", "all_splits", "window", "min_chunk", "prefix_splits", "prefix_chunk", "counter_stride"]
)
def _decode(
    qkv, out, kv, scales, staged, tables, slots, positions, firsts, q_norm, k_norm, cos_sin, sinks, partial, lse, counters,
    scale, softcap, window, eps, splits, all_splits, min_chunk, prefix_splits, prefix_chunk,
    qkv_stride, table_stride, block_stride, counter_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr,
    D: tl.constexpr, D_P: tl.constexpr, BT: tl.constexpr, ROPE_DIM: tl.constexpr,
    NORM: tl.constexpr, FUSED: tl.constexpr, PREFIX: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PREFIX_BLOCK_N: tl.constexpr,
    PDL: tl.constexpr, STAGES: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    # All heads of the longest context go first: what begins last is then short, whatever the lengths are.
    row = tl.program_id(1).to(tl.int64)
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_P)
    out_at = out + (row * HEADS + kv_head * GROUP + m[:, None]) * D + d[None, :]
    q_inside = (m[:, None] < GROUP) & (d[None, :] < D)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row)
    if slot < 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
        if split == 0:
            tl.store(out_at, tl.zeros([BLOCK_M, D_P], out.dtype.element_ty), q_inside)
        return
    low = 0
    if WINDOW:
        low = tl.maximum(position - window + 1, 0)
    if PREFIX:
        low = tl.load(firsts + row)
    end = position
    if CODE == INT4:
        # Keys of the token's own group are staged, and the last split's.
        end = position // KEY_GROUP * KEY_GROUP
    elif not FUSED:
        end = position + 1
    chunk, used = split_range(low, end, splits, min_chunk, BLOCK_N)
    if split >= used:
        # Without a wait, which would only keep others off the multiprocessor: the first split waits for all.
        return
    if PDL and not PREFIX:
        tl.extra.cuda.gdc_wait()
    first = qkv + row * qkv_stride
    base = first + (kv_head * GROUP + m[:, None]) * D
    dtype = qkv.dtype.element_ty
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_P], tl.float32)
    # Queries are multiplied with codes as fp16; see `headrace.engine.kernels.codes`.
    if CODE != PLAIN:
        dtype = dtype if dtype == tl.float32 else tl.float16
    if FUSED:
        turn = cos_sin + position.to(tl.int64) * ROPE_DIM
        q = rotated(base, d[None, :], q_inside, q_norm, turn, eps, D, ROPE_DIM, NORM).to(dtype)
        if split == used - 1:
            # The new token's own key and value come from the projection and go into the cache here.
            one = (tl.arange(0, 1)[:, None] == 0) & (d[None, :] < D)
            k_base = first + (HEADS + kv_head + tl.arange(0, 1)[:, None]) * D
            k_new = rotated(k_base, d[None, :], one, k_norm, turn, eps, D, ROPE_DIM, NORM)
            v_new = tl.load(first + (HEADS + KV_HEADS + kv_head) * D + d[None, :], one, 0.0)
            page = tl.load(tables + slot * table_stride + position // BT).to(tl.int64)
            k_new, v_new = put_token(
                k_new, v_new, kv, scales, page * block_stride, position % BT, kv_head + tl.arange(0, 1), d,
                one & (page >= 0), KV_HEADS, D, BT, CODE,
            )  # fmt: skip
            top = scored(tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1), scale, softcap, SOFTCAP)
            total += 1.0
            acc += v_new.to(tl.float32)
    else:
        q = tl.load(base + d[None, :], q_inside, 0.0).to(dtype)
    begin = low + split * chunk
    stop = tl.minimum(begin + chunk, end)
    if CODE == INT4:
        own_stop = tl.where(split == used - 1, position + 1, end)
        acc, top, total = over_groups(
            q, kv, scales, staged + (slot * KV_HEADS + kv_head) * (KEY_GROUP * D), tables + slot * table_stride, kv_head,
            begin, stop, tl.maximum(low, end), own_stop, top, total, scale, softcap, block_stride,
            KV_HEADS, D, D_P, BT, SOFTCAP, STAGES,
        )  # fmt: skip
    else:
        acc, top, total = over_pages(
            q, kv, scales, tables + slot * table_stride, kv_head, begin, stop, acc, top, total, scale, softcap,
            block_stride, KV_HEADS, D, D_P, BT, SOFTCAP, BLOCK_N, STAGES, CODE,
        )  # fmt: skip
    if PDL and PREFIX:
        # The projection was complete before the shared prefixes' kernel let this one start; their parts are needed now.
        tl.extra.cuda.gdc_wait()
    total_at = (row * KV_HEADS + kv_head) * all_splits
    prefix_used = 0
    if PREFIX:
        _, prefix_used = split_range(0, low, prefix_splits, prefix_chunk, PREFIX_BLOCK_N)
        prefix_used = tl.where(low > 0, prefix_used, 0)
    if used == 1:
        finish(
            acc, top, total, partial, lse, total_at + splits, prefix_used, out, sinks, row, kv_head,
            HEADS, GROUP, GROUP_P, D, D_P, SINKS, PREFIX, BLOCK_M,
        )  # fmt: skip
    else:
        # Partial results [rows, kv_heads, splits, group, dims], each normalized, with its log-sum-exp.
        put_part(partial, lse, total_at + split, acc, top, total, GROUP_P, D_P, BLOCK_M)
        tl.debug_barrier()
        counter = counters + (row * KV_HEADS + kv_head) * counter_stride
        count, stride = used, 1
        last = used <= SPAN
        if used > SPAN:
            span = split // SPAN
            first_of = total_at + span * SPAN
            in_span = tl.minimum(used - span * SPAN, SPAN)
            count, stride = tl.cdiv(used, SPAN), SPAN
            last = arrived_last(counter + 1 + span, in_span)
            if last:
                acc_s, top_s, total_s = merged(partial, lse, first_of, 1, in_span, GROUP_P, D_P)
                tl.debug_barrier()
                put_part(partial, lse, first_of, acc_s, top_s, total_s, GROUP_P, D_P, GROUP_P)
                tl.debug_barrier()
        if last:  # noqa: SIM102 - the kernel language has no short circuit
            if arrived_last(counter, count):
                acc_m, top_m, total_m = merged(partial, lse, total_at, stride, count, GROUP_P, D_P)
                finish(
                    acc_m, top_m, total_m, partial, lse, total_at + splits, prefix_used, out, sinks, row, kv_head,
                    HEADS, GROUP, GROUP_P, D, D_P, SINKS, PREFIX, GROUP_P,
                )  # fmt: skip


@triton.jit
def finish(
    acc, top, total, partial, lse, first, prefixes, out, sinks, row, kv_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr,
    SINKS: tl.constexpr, PREFIX: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Merge a row's own result, as M query heads, with the parts of its shared prefix and its sinks, and store it."""
    if PREFIX:
        if M > GROUP_P:
            # Only the first rows of the tile are heads.
            acc, top, total = leading(acc, M, GROUP_P), leading(top, M, GROUP_P), leading(total, M, GROUP_P)
        if prefixes > 0:
            other, other_top, other_total = merged(partial, lse, first, 1, prefixes, GROUP_P, D_P)
            best = tl.maximum(top, other_top)
            mine, others = tl.exp2(top - best), tl.exp2(other_top - best)
            acc = acc * mine[:, None] + other * others[:, None]
            total = total * mine + other_total * others
            top = best
    R: tl.constexpr = GROUP_P if PREFIX else M
    m = tl.arange(0, R)
    d = tl.arange(0, D_P)
    if SINKS:
        sink = tl.load(sinks + kv_head * GROUP + m, m < GROUP, float("-inf")).to(tl.float32) * LOG2E
        total += tl.exp2(sink - top)
    target = out + (row * HEADS + kv_head * GROUP + m[:, None]) * D + d[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), (m[:, None] < GROUP) & (d[None, :] < D))


@triton.jit
def leading(x, M: tl.constexpr, COUNT: tl.constexpr):
    """The first COUNT of M rows, both powers of two."""
    row = tl.arange(0, M)
    if len(x.shape) == 2:
        kept = tl.where(row[:, None] < COUNT, x, 0.0)
        return tl.sum(tl.reshape(kept, [M // COUNT, COUNT, x.shape[1]]), 0)
    else:
        return tl.sum(tl.reshape(tl.where(row < COUNT, x, 0.0), [M // COUNT, COUNT]), 0)


@triton.jit
def arrived_last(counter, expected):
    """Whether this program is the last of `expected` to arrive; the counter is then back at zero."""
    last = tl.atomic_add(counter, 1, sem="acq_rel") == expected - 1
    if last:
        tl.debug_barrier()
        tl.store(counter, 0)
    return last


@triton.jit
def put_part(
    partial, lse, part, acc, top, total, GROUP_P: tl.constexpr, D_P: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Store one part, normalized, and its log-sum-exp."""
    m = tl.arange(0, M)
    d = tl.arange(0, D_P)
    tl.store(partial + (part * GROUP_P + m[:, None]) * D_P + d[None, :], acc / total[:, None], m[:, None] < GROUP_P)
    tl.store(lse + part * GROUP_P + m, top + tl.log2(total), m < GROUP_P)


@triton.jit
def merged(partial, lse, first, stride, count, GROUP_P: tl.constexpr, D_P: tl.constexpr):
    """The online softmax over `count` parts from `first` on, `stride` apart: accumulator, maximum and sum."""
    g = tl.arange(0, GROUP_P)
    d = tl.arange(0, D_P)
    s = tl.arange(0, SPAN)
    top = tl.full([GROUP_P], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_P], tl.float32)
    acc = tl.zeros([GROUP_P, D_P], tl.float32)
    for s0 in range(0, count, SPAN):
        at = first + (s0 + s) * stride
        there = s0 + s < count
        part_lse = tl.load(
            lse + at[:, None] * GROUP_P + g[None, :], there[:, None], float("-inf"), cache_modifier=".cg"
        )
        part = tl.load(
            partial + (at[:, None, None] * GROUP_P + g[None, :, None]) * D_P + d[None, None, :],
            there[:, None, None], 0.0, cache_modifier=".cg",
        )  # fmt: skip
        best = tl.maximum(top, tl.max(part_lse, 0))
        shrink = tl.exp2(top - best)
        weights = tl.exp2(part_lse - best[None, :])
        acc = acc * shrink[:, None] + tl.sum(part * weights[:, :, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = best
    return acc, top, total


@triton.jit(do_not_specialize=["splits", "suffix_splits", "all_splits", "min_chunk"])
def _prefix(
    qkv, kv, scales, tables, slots, positions, tiles, q_norm, cos_sin, partial, lse,
    scale, softcap, eps, splits, suffix_splits, all_splits, min_chunk, qkv_stride, table_stride, block_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr,
    BT: tl.constexpr, ROPE_DIM: tl.constexpr, NORM: tl.constexpr, FUSED: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    if PDL:
        # In this order: what starts now finds the projection complete.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row0 = tl.load(tiles + 3 * tl.program_id(0))
    row1 = tl.load(tiles + 3 * tl.program_id(0) + 1)
    prefix = tl.load(tiles + 3 * tl.program_id(0) + 2)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    chunk, used = split_range(0, prefix, splits, min_chunk, BLOCK_N)
    if row1 <= row0 or split >= used:
        return
    slot = tl.load(slots + row0).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_P)
    row = row0 + m // GROUP_P
    g = m % GROUP_P
    inside = (row < row1) & (g < GROUP)
    base = qkv + (row.to(tl.int64) * qkv_stride + (kv_head * GROUP + g) * D)[:, None]
    q_inside = inside[:, None] & (d[None, :] < D)
    dtype = qkv.dtype.element_ty
    if CODE != PLAIN:
        dtype = dtype if dtype == tl.float32 else tl.float16
    if FUSED:
        position = tl.load(positions + row, inside, 0).to(tl.int64)
        turn = cos_sin + (position * ROPE_DIM)[:, None]
        q = rotated(base, d[None, :], q_inside, q_norm, turn, eps, D, ROPE_DIM, NORM).to(dtype)
    else:
        q = tl.load(base + d[None, :], q_inside, 0.0).to(dtype)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_P], tl.float32)
    begin = split * chunk
    stop = tl.minimum(begin + chunk, prefix)
    acc, top, total = over_pages(
        q, kv, scales, tables + slot * table_stride, kv_head, begin, stop, acc, top, total, scale, softcap,
        block_stride, KV_HEADS, D, D_P, BT, SOFTCAP, BLOCK_N, STAGES, CODE,
    )  # fmt: skip
    part = (row.to(tl.int64) * KV_HEADS + kv_head) * all_splits + suffix_splits + split
    there = (row < row1) & (g < GROUP_P)
    tl.store(partial + (part * GROUP_P + g)[:, None] * D_P + d[None, :], acc / total[:, None], there[:, None])
    tl.store(lse + part * GROUP_P + g, top + tl.log2(total), there)


class DecodeWorkspace:
    """Partial results of split contexts; shared by all layers, since a layer is done with it before the next begins."""

    def __init__(self, rows: int, kv_heads: int, group: int, dim: int, splits_of_rows, device: torch.device) -> None:
        """`splits_of_rows(n)`: the largest number of splits that a step of n rows uses."""
        group_p, dim_p = power_of_2(group), padded_dim(INT4.value, dim)
        most = max(n * splits_of_rows(n) for n in range(1, rows + 1)) * kv_heads * group_p
        self.partial = torch.empty(most * dim_p, dtype=torch.float32, device=device)
        self.lse = torch.empty(most, dtype=torch.float32, device=device)
        # Of each row and KV head: one counter for the merge of all, one for each span of parts.
        most_splits = max(splits_of_rows(n) for n in range(1, rows + 1))
        self.counter_stride = 1 + -(-most_splits // SPAN.value)
        self.counters = torch.zeros(rows * kv_heads * self.counter_stride, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self.partial.nbytes + self.lse.nbytes + self.counters.nbytes


def decode_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    kv: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    work: DecodeWorkspace,
    heads: int,
    *,
    scale: float,
    splits: int,
    scales: torch.Tensor | None = None,
    staged: torch.Tensor | None = None,
    min_chunk: int = 128,
    cos_sin: torch.Tensor | None = None,
    rope_dim: int = 0,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    firsts: torch.Tensor | None = None,
    tiles: torch.Tensor | None = None,
    prefix_splits: int = 8,
    prefix_chunk: int = 128,
    prefix_block_n: int = 64,
    prefix_warps: int = 4,
    prefix_stages: int = 2,
    block_n: int = 64,
    num_warps: int = 2,
    stages: int = 3,
    pdl: bool = False,
) -> None:
    """out [rows, heads * dim] = attention of each row's query over its slot's context up to `positions[row]`.

    `qkv` [rows, (heads + 2 kv_heads) * dim]. With `cos_sin` the projection is raw: this kernel normalizes and rotates it and
    writes the row's key and value to the cache; otherwise `rope_cache` has done so. `kv`, `scales`: see
    `headrace.engine.kernels.codes.geometry`. Rows with slot -1 give zeros. Cascade: `firsts` [rows] keys are shared; `tiles`
    [n, 3] (first row, end row, shared keys) says which rows share them, at most 64 / next_power_of_2(group) rows a tile.
    A cache of INT4 is read a group of tokens at a time, whatever the blocks; the keys of each row's own group are `staged`
    (`headrace.engine.kernels.groups.code_groups`) after `rope_cache`.
    """
    rows = len(slots)
    code, kv_heads, block_tokens, dim = geometry(kv, scales)
    group = heads // kv_heads
    group_p, dim_p = power_of_2(group), padded_dim(code, dim)
    fused, prefix = cos_sin is not None, tiles is not None
    if code == INT4.value:
        assert staged is not None
        assert not fused
        block_n = prefix_block_n = KEY_GROUP.value
    assert not (prefix and window is not None)
    assert splits <= (work.counter_stride - 1) * SPAN.value
    all_splits = splits + prefix_splits if prefix else splits
    some = work.lse
    given_scales = kv if scales is None else scales
    shape = {"GROUP": group, "GROUP_P": group_p, "D": dim, "D_P": dim_p}
    norms = (some if q_norm is None else q_norm, some if k_norm is None else k_norm)
    rotation = {"ROPE_DIM": rope_dim if fused else 0, "NORM": q_norm is not None, "FUSED": fused}
    early = {"launch_pdl": True} if pdl else {}
    if prefix:
        _prefix[(len(tiles), kv_heads, prefix_splits)](
            qkv, kv, given_scales, tables, slots, positions, tiles, norms[0], cos_sin if fused else some, work.partial, work.lse,
            scale, softcap or 0.0, eps, prefix_splits, splits, all_splits, prefix_chunk,
            qkv.stride(0), tables.stride(0), kv.stride(0),
            KV_HEADS=kv_heads, **shape, BT=block_tokens, **rotation, SOFTCAP=softcap is not None, BLOCK_M=64,
            BLOCK_N=prefix_block_n, PDL=pdl, STAGES=prefix_stages, CODE=code, num_warps=prefix_warps, **early,
        )  # fmt: skip
    _decode[(kv_heads, rows, splits)](
        qkv, out, kv, given_scales, some if staged is None else staged, tables, slots, positions, firsts if prefix else slots, *norms,
        cos_sin if fused else some, some if sinks is None else sinks, work.partial, work.lse, work.counters,
        scale, softcap or 0.0, window or 0, eps, splits, all_splits, min_chunk, prefix_splits, prefix_chunk,
        qkv.stride(0), tables.stride(0), kv.stride(0), work.counter_stride,
        HEADS=heads, KV_HEADS=kv_heads, **shape, BT=block_tokens, **rotation, PREFIX=prefix,
        WINDOW=window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        BLOCK_M=max(16, group_p), BLOCK_N=block_n, PREFIX_BLOCK_N=prefix_block_n, PDL=pdl, STAGES=stages, CODE=code,
        num_warps=num_warps, **early,
    )  # fmt: skip
