"""Decode attention on Hopper cards that begins before the projection has ended: `decode` with bulk copies into a ring.

Of plain keys and values, and of codes of 8 bits (`headrace.engine.kernels.codes`): a page of these is half as many bytes, its words
come to the tensor cores' registers as numbers of 16 bits do and split there into even and odd dimensions.

All but the newest of a context's keys and values were written in earlier steps. So a program looks up its blocks and asks for
as many as its ring holds before it waits for the kernel that makes queries; what follows the wait (rotation, the new token)
hides behind loads that are under way. A ring in shared memory needs no registers and no addresses from the threads that
compute, so that enough bytes are in flight: 4.5 TB/s times a latency of about a microsecond is 34 KB on each multiprocessor.

Each warp takes every WARPS-th group of PAGES pages of PAGE tokens and has a softmax of its own: as a dimension of every
tensor that lies across warps, so that nothing is exchanged between them before the end. There they are merged, and then
the programs of a context.

Written in Gluon, Triton's language with explicit layouts. Gluon has no interpreter: `decode` is the reference.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.engine.kernels.codes import (
    INT8,
    PLAIN,
    VALUE_UNIT,
    even,
    fp8_codes,
    geometry,
    int8_codes,
    int8_scale,
    odd,
)
from headrace.engine.kernels.decode import DecodeWorkspace
from headrace.engine.kernels.launchers import power_of_2

PAGE = gl.constexpr(16)
"""Tokens that a warp takes at once; blocks are one or more of them."""
LINE = gl.constexpr(64)
"""Scales that are copied of a page, those of its tokens and more: what is copied begins every 128 bytes of shared memory."""
LOG2E = gl.constexpr(1.4426950408889634)
NOTHING = gl.constexpr(-1e30)
"""The greatest score where there is none yet: finite, so that differences are numbers."""
MERGED = 128
"""Values of parts that a thread of a merge holds at once."""


@gluon.jit
def _blocks(table, page, end, BT: gl.constexpr, WARPS: gl.constexpr):
    """The numbers of the blocks that hold the WARPS pages from `page` on; past the end they repeat the last one's."""
    found = ()
    for w in gl.static_range(WARPS):
        found += (gl.load(table + gl.minimum(page + w, end - 1) * PAGE // BT),)
    return found


@gluon.jit
def _ask(
    cached, steps, ring, lines, full, stage, blocks, page, end, kv_head, block_stride,
    KV_HEADS: gl.constexpr, D: gl.constexpr, BT: gl.constexpr, WARPS: gl.constexpr, CODE: gl.constexpr,
):  # fmt: skip
    """Bring the keys and values of WARPS pages to a stage, each page by one copy, and by two more the scales of INT8."""
    bar = full.index(stage)
    PAGE_BYTES: gl.constexpr = 4 * PAGE * D if CODE == PLAIN else 2 * PAGE * D + (4 * LINE if CODE == INT8 else 0)
    mbarrier.expect(bar, WARPS * PAGE_BYTES)
    for w in gl.static_range(WARPS):
        at = kv_head * BT + gl.minimum(page + w, end - 1) * PAGE % BT
        place = [blocks[w], 0, 0, at, 0] if CODE == PLAIN else [blocks[w], 0, at, 0]
        tma.async_copy_global_to_shared(cached, place, bar, ring.index(stage * WARPS + w))
        if CODE == INT8:
            line, to = blocks[w] * block_stride + at, 2 * (stage * WARPS + w)
            tma.async_copy_global_to_shared(steps, [line], bar, lines.index(to))
            tma.async_copy_global_to_shared(steps, [line + KV_HEADS * BT], bar, lines.index(to + 1))


@gluon.jit
def _advance(
    q, pages, units, full, stage, phase, n, limit, acc, top, total, scale,
    MASKED: gl.constexpr, WARPS: gl.constexpr, PAGES: gl.constexpr, SUMS: gl.constexpr, CODE: gl.constexpr,
):  # fmt: skip
    """A stage's pages into the softmaxes of all warps; if MASKED, of tokens `n` [WARPS, 1, PAGE] and PAGE more those before `limit`.

    Of numbers q and acc are the halves of heads, of codes their even and their odd dimensions.
    """
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    kind: gl.constexpr = q[0].dtype
    mbarrier.wait(full.index(stage), phase)
    here = pages.index(stage)
    turned = here.permute((0, 2, 1))
    none = gl.zeros([WARPS, 16, PAGE], gl.float32, SUMS)
    VECTORS: gl.constexpr = 4 * PAGE if CODE == PLAIN else 2 * PAGE
    all_scores = ()
    for j in gl.static_range(PAGES):
        if CODE == PLAIN:
            k0 = turned.slice(j * VECTORS, PAGE, 2).load(RIGHT)
            k1 = turned.slice(j * VECTORS + PAGE, PAGE, 2).load(RIGHT)
        else:
            k = turned.slice(j * VECTORS, PAGE, 2).load(RIGHT)
            k0, k1 = even(k, CODE, kind), odd(k, CODE, kind)
        scores = gl.nvidia.ampere.mma_v2(q[0], k0, none) + gl.nvidia.ampere.mma_v2(q[1], k1, none)
        if CODE == INT8:
            scores *= units.index(stage).slice(2 * j, 1, 1).slice(0, PAGE, 2).load(SUMS).to(gl.float32)
        if MASKED:
            scores = gl.where(n + j * PAGE < limit, scores, float("-inf"))
        all_scores += (scores,)
    most = all_scores[0]
    for j in gl.static_range(1, PAGES):
        most = gl.maximum(most, all_scores[j])
    best = gl.maximum(top, gl.max(most, 2) * scale)
    shrink = gl.exp2(top - best)
    best3, shrink3 = gl.expand_dims(best, 2), gl.expand_dims(shrink, 2)
    # Added up over a row's threads at the end.
    total *= shrink3
    acc0, acc1 = acc[0] * shrink3, acc[1] * shrink3
    for j in gl.static_range(PAGES):
        weights = gl.exp2(all_scores[j] * scale - best3)
        total += weights
        if MASKED:
            seen = n + j * PAGE < limit
        if CODE == INT8:
            by = units.index(stage).slice(2 * j + 1, 1, 1).slice(0, PAGE, 2).load(SUMS).to(gl.float32) * VALUE_UNIT
            if MASKED:
                by = gl.where(seen, by, 0.0)
            weights *= by
        p = gl.convert_layout(weights.to(kind), gl.DotOperandLayout(0, SUMS, 2))
        if CODE == PLAIN:
            v0 = here.slice(j * VECTORS + 2 * PAGE, PAGE, 1).load(RIGHT)
            v1 = here.slice(j * VECTORS + 3 * PAGE, PAGE, 1).load(RIGHT)
        else:
            v = here.slice(j * VECTORS + PAGE, PAGE, 1).load(RIGHT)
            v0, v1 = even(v, CODE, kind), odd(v, CODE, kind)
        if MASKED:
            # Beyond the context a block may hold anything, also no numbers.
            there = gl.convert_layout(gl.permute(seen, (0, 2, 1)), RIGHT)
            v0 = gl.where(there, v0, gl.zeros_like(v0))
            v1 = gl.where(there, v1, gl.zeros_like(v1))
        acc0 = gl.nvidia.ampere.mma_v2(p, v0, acc0)
        acc1 = gl.nvidia.ampere.mma_v2(p, v1, acc1)
    return (acc0, acc1), best, total


@gluon.jit
def _eight2(x, WARPS: gl.constexpr):
    """The first 8 of 16 rows."""
    first, _ = x.reshape([WARPS, 2, 8]).permute([0, 2, 1]).split()
    return first


@gluon.jit
def _eight3(x, WARPS: gl.constexpr, HALF: gl.constexpr):
    first, _ = x.reshape([WARPS, 2, 8, HALF]).permute([0, 2, 3, 1]).split()
    return first


@gluon.jit
def _evens(x0, x1):
    """The even and the odd dimensions of heads given as halves [rows, dims / 2]."""
    both = gl.join(x0, x1).permute([0, 2, 1]).reshape([x0.shape[0], 2 * x0.shape[1]])
    return both.reshape([x0.shape[0], x0.shape[1], 2]).split()


@gluon.jit
def _heads(acc0, acc1, CODE: gl.constexpr):
    """Whole heads [rows, dims] of halves, or of even and odd dimensions."""
    both = gl.join(acc0, acc1)
    if CODE == PLAIN:
        both = both.permute([0, 2, 1])
    return both.reshape([acc0.shape[0], 2 * acc0.shape[1]])


@gluon.jit
def _int8_scale(x0, x1):
    """The scale (fp16) of INT8 codes of vectors given in two parts along the last axis."""
    AXIS: gl.constexpr = len(x0.shape) - 1
    nan = gl.maximum((x0 != x0).to(gl.int32), (x1 != x1).to(gl.int32))
    return int8_scale(gl.max(gl.maximum(gl.abs(x0), gl.abs(x1)), AXIS), gl.max(nan, AXIS))


@gluon.jit
def _meant(x0, x1, CODE: gl.constexpr):
    """What the codes mean (fp32) of fp32 vectors given in two parts."""
    if CODE == INT8:
        step = gl.expand_dims(_int8_scale(x0, x1).to(gl.float32), len(x0.shape) - 1)
        return int8_codes(x0, step).to(gl.float32) * step, int8_codes(x1, step).to(gl.float32) * step
    else:
        return _rounded_to_fp8(x0), _rounded_to_fp8(x1)


@gluon.jit
def _rounded_to_fp8(x):
    """To FP8 and back. Only for this: of code that also stores such a conversion's result ptxas 12.8 made something else."""
    found = gl.inline_asm_elementwise(
        "{ .reg .b16 t; .reg .b32 u; cvt.rn.satfinite.e4m3x2.f32 t, $1, $2; cvt.rn.f16x2.e4m3x2 u, t; "
        "prmt.b32 $0, u, 0, 0x1032; }",
        "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2,
    )  # fmt: skip
    return found.to(gl.float32)


@gluon.jit
def _put_codes(kv, scales, block, place, d, x0, x1, stored, D: gl.constexpr, CODE: gl.constexpr):
    """Store fp32 vectors [rows, dims / 2], twice, that are all the same, once, in codes: vector `place` of a block, `block` words on."""
    target = (kv + block).to(gl.pointer_type(gl.int8), bitcast=True) + place * D + d
    rows = gl.zeros_like(x0).to(gl.int32)
    if CODE == INT8:
        scale = _int8_scale(x0, x1)
        step = gl.expand_dims(scale.to(gl.float32), 1)
        gl.store(target + rows, int8_codes(x0, step), stored)
        gl.store(target + D // 2 + rows, int8_codes(x1, step), stored)
        same = gl.arange(0, scale.shape[0], scale.type.layout)
        gl.store(scales + block + place + same * 0, scale, (same < 1) & (gl.max(stored.to(gl.int32), 1) > 0))
    else:
        gl.store(target + rows, fp8_codes(x0), stored)
        gl.store(target + D // 2 + rows, fp8_codes(x1), stored)


@gluon.jit
def _turned(base, d, inside, norm, turn, eps, HALF: gl.constexpr, ROPE: gl.constexpr, NORM: gl.constexpr):
    """Both halves of heads at `base`, normalized and rotated, fp32."""
    x0 = gl.load(base + d, inside, 0.0).to(gl.float32)
    x1 = gl.load(base + HALF + d, inside, 0.0).to(gl.float32)
    if NORM:
        shrink = gl.rsqrt((gl.sum(x0 * x0, 1) + gl.sum(x1 * x1, 1)) / (2 * HALF) + eps)
        x0 = x0 * gl.expand_dims(shrink, 1) * gl.load(norm + d).to(gl.float32)
        x1 = x1 * gl.expand_dims(shrink, 1) * gl.load(norm + HALF + d).to(gl.float32)
    if ROPE:
        cos = gl.load(turn + d)
        sin = gl.load(turn + HALF + d)
        return x0 * cos - x1 * sin, x1 * cos + x0 * sin
    else:
        return x0, x1


@gluon.jit
def _repeated(x, ROWS: gl.constexpr):
    """16 rows that repeat those of x [1, ROWS, ...]: what a tile has beside its queries counts for nothing."""
    LAYOUT: gl.constexpr = x.type.layout
    if len(x.shape) == 3:
        wide = gl.zeros([16 // ROWS, ROWS, x.shape[2]], x.dtype, LAYOUT)
        return gl.broadcast(x, wide)[0].reshape([16, x.shape[2]])
    else:
        return gl.broadcast(x, gl.zeros([16 // ROWS, ROWS], x.dtype, LAYOUT))[0].reshape([16])


@gluon.jit
def _merged(
    partial, lse, first, count, GROUP_P: gl.constexpr, D: gl.constexpr, AT_ONCE: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """The softmax over `count` parts: [GROUP_P, D], not divided, and its sum [GROUP_P]."""
    s = gl.arange(0, AT_ONCE, gl.SliceLayout(1, gl.SliceLayout(2, PARTS)))
    g = gl.arange(0, GROUP_P, gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))
    g3 = gl.expand_dims(gl.arange(0, GROUP_P, gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))[None, :], 2)
    d3 = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))[None, :], 1)
    top = gl.full([GROUP_P], NOTHING, gl.float32, gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))
    total = gl.zeros_like(top)
    acc = gl.zeros([GROUP_P, D], gl.float32, gl.SliceLayout(0, PARTS))
    for s0 in range(0, count, AT_ONCE):
        there = (s0 + s < count)[:, None]
        at = (first + s0 + s)[:, None] * GROUP_P
        part_lse = gl.load(lse + at + g[None, :], there & (g >= 0)[None, :], float("-inf"), cache_modifier=".cg")
        inside = gl.expand_dims(there, 2) & (g3 >= 0) & (d3 >= 0)
        part = gl.load(partial + (gl.expand_dims(at, 2) + g3) * D + d3, inside, 0.0, cache_modifier=".cg")
        best = gl.maximum(top, gl.max(part_lse, 0))
        shrink = gl.exp2(top - best)
        weights = gl.exp2(part_lse - best[None, :])
        by = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, gl.SliceLayout(0, PARTS))), 1)
        acc = acc * by + gl.sum(part * gl.expand_dims(weights, 2), 0)
        total = total * shrink + gl.sum(weights, 0)
        top = best
    return acc, total


@gluon.jit(do_not_specialize=["splits", "least"])
def _decode_hopper(
    cached, steps_of, qkv, out, kv, scales, tables, slots, positions, q_norm, k_norm, cos_sin, partial, lse, counters,
    scale, eps, splits, least, qkv_stride, table_stride, block_stride, counter_stride,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_P: gl.constexpr, D: gl.constexpr, BT: gl.constexpr,
    ROPE: gl.constexpr, NORM: gl.constexpr, FUSED: gl.constexpr, WARPS: gl.constexpr, PAGES: gl.constexpr, STAGES: gl.constexpr,
    AT_ONCE: gl.constexpr, PDL: gl.constexpr, PAGED: gl.constexpr, BATCHED: gl.constexpr, LINES: gl.constexpr, UNITS: gl.constexpr,
    TILE: gl.constexpr, PARTS: gl.constexpr, CODE: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = D // 2
    AT_A_TIME: gl.constexpr = WARPS * PAGES
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    HEADS: gl.constexpr = KV_HEADS * GROUP
    given: gl.constexpr = qkv.dtype.element_ty
    kind: gl.constexpr = given if CODE == PLAIN else gl.float16
    kv_head = gl.program_id(0)
    row = gl.program_id(1)
    split = gl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = gl.load(slots + row).to(gl.int64)
    position = gl.load(positions + row)
    m = gl.arange(0, GROUP_P, gl.SliceLayout(1, TILE))[:, None]
    d = gl.arange(0, HALF, gl.SliceLayout(0, TILE))[None, :]
    heads = (m < GROUP) & (d >= 0)
    if slot < 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
        if split == 0:
            nought_at = out + row.to(gl.int64) * (HEADS * D) + (kv_head * GROUP + m) * D + d
            nought = gl.zeros([GROUP_P, HALF], given, TILE)
            gl.store(nought_at, nought, heads)
            gl.store(nought_at + HALF, nought, heads)
        return
    # Cached pages are dealt out evenly, at least `least` to a program.
    count = (position + PAGE - 1) // PAGE
    used = gl.maximum(gl.minimum(count // least, splits), 1)
    if split >= used:
        # Without a wait, which would only keep others off the multiprocessor: the first split waits for all.
        return
    begin = count * split // used
    end = count * (split + 1) // used
    table = tables + slot * table_stride
    if CODE == PLAIN:
        # Of each page: halves of keys, then of values, each half of a vector 128 bytes, the widest swizzle.
        ring = gl.allocate_shared_memory(kind, [STAGES * AT_A_TIME, 1, 2, 2, PAGE, HALF], PAGED)
        pages = ring._reinterpret(kind, [STAGES, WARPS, PAGES * 4 * PAGE, HALF], BATCHED)
    else:
        # Keys, then values, each vector as words of two neighbouring dimensions.
        ring = gl.allocate_shared_memory(gl.int16, [STAGES * AT_A_TIME, 1, 2, PAGE, HALF], PAGED)
        pages = ring._reinterpret(gl.int16, [STAGES, WARPS, PAGES * 2 * PAGE, HALF], BATCHED)
    if CODE == INT8:
        lines = gl.allocate_shared_memory(gl.float16, [STAGES * AT_A_TIME * 2, LINE], LINES)
        units = lines._reinterpret(gl.float16, [STAGES, WARPS, PAGES * 2, LINE], UNITS)
    else:
        lines, units = ring, pages
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    steps = (end - begin + AT_A_TIME - 1) // AT_A_TIME
    ahead = ()
    for i in gl.static_range(STAGES + 1):
        page = gl.minimum(begin + i * AT_A_TIME, gl.maximum(end - 1, 0))
        ahead += (_blocks(table, page, gl.maximum(end, 1), BT, AT_A_TIME),)
    for i in gl.static_range(STAGES):
        if i < steps:
            _ask(
                cached, steps_of, ring, lines, full, i, ahead[i], begin + i * AT_A_TIME, end, kv_head, block_stride,
                KV_HEADS, D, BT, AT_A_TIME, CODE,
            )  # fmt: skip
    blocks = ahead[STAGES]
    if PDL:
        tl.extra.cuda.gdc_wait()
    first = qkv + row.to(gl.int64) * qkv_stride
    turn = cos_sin + position.to(gl.int64) * D
    ROTATE: gl.constexpr = ROPE and FUSED
    q0, q1 = _turned(first + (kv_head * GROUP + m) * D, d, heads, q_norm, turn, eps, HALF, ROTATE, NORM and FUSED)
    q0, q1 = q0.to(kind), q1.to(kind)
    # The last split has the new token's key and value: from the projection, and into the cache.
    newest = split == used - 1
    one = (m < 1) & (d >= 0) & newest
    k_base = first + (HEADS + kv_head) * D
    k0, k1 = _turned(k_base + m * 0, d, d >= 0, k_norm, turn, eps, HALF, ROTATE, NORM and FUSED)
    k0, k1 = k0.to(given), k1.to(given)
    v_base = first + (HEADS + KV_HEADS + kv_head) * D
    if CODE == PLAIN:
        dv = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, :], 1)
        v0, v1 = gl.load(v_base + dv).to(gl.float32), gl.load(v_base + HALF + dv).to(gl.float32)
    else:
        v0 = gl.load(v_base + d + m * 0).to(gl.float32)
        v1 = gl.load(v_base + HALF + d + m * 0).to(gl.float32)
    if FUSED:
        block = gl.load(tables + slot * table_stride + position // BT).to(gl.int64)
        place = kv_head * BT + position % BT
        stored = one & (block >= 0)
        if CODE == PLAIN:
            target = kv + block * block_stride + place * D + d
            gl.store(target + m * 0, k0, stored)
            gl.store(target + HALF + m * 0, k1, stored)
            v_at = target + KV_HEADS * BT * D
            gl.store(v_at + m * 0, gl.load(v_base + d + m * 0), stored)
            gl.store(v_at + HALF + m * 0, gl.load(v_base + HALF + d + m * 0), stored)
        else:
            k0, k1 = k0.to(gl.float32), k1.to(gl.float32)
            _put_codes(kv, scales, block * block_stride, place, d, k0, k1, stored, D, CODE)
            k0, k1 = _meant(k0, k1, CODE)
            _put_codes(kv, scales, block * block_stride, KV_HEADS * BT + place, d, v0, v1, stored, D, CODE)
            v0, v1 = _meant(v0, v1, CODE)
    if CODE != PLAIN:
        v0, v1 = _evens(_repeated(gl.expand_dims(v0, 0), GROUP_P), _repeated(gl.expand_dims(v1, 0), GROUP_P))
        v0 = gl.expand_dims(gl.convert_layout(v0, gl.SliceLayout(0, SUMS)), 0)
        v1 = gl.expand_dims(gl.convert_layout(v1, gl.SliceLayout(0, SUMS)), 0)
    new = q0.to(gl.float32) * k0.to(gl.float32) + q1.to(gl.float32) * k1.to(gl.float32)
    new = _repeated(gl.sum(gl.expand_dims(new, 0), 2), GROUP_P)
    new = gl.convert_layout(new, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :]
    scale *= LOG2E
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None]
    mine = (warp == 0) & newest
    top = gl.where(mine, new * scale, NOTHING)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    none = gl.zeros([WARPS, 16, HALF], kind, LEFT)
    q0, q1 = _repeated(gl.expand_dims(q0, 0), GROUP_P), _repeated(gl.expand_dims(q1, 0), GROUP_P)
    if CODE != PLAIN:
        q0, q1 = _evens(q0, q1)
    q0 = gl.expand_dims(gl.convert_layout(q0, gl.SliceLayout(0, LEFT)), 0)
    q1 = gl.expand_dims(gl.convert_layout(q1, gl.SliceLayout(0, LEFT)), 0)
    q = (gl.broadcast(q0, none)[0], gl.broadcast(q1, none)[0])
    zero = gl.zeros([WARPS, 16, HALF], gl.float32, SUMS)
    mine3 = gl.expand_dims(mine, 2)
    n3 = gl.expand_dims(gl.arange(0, PAGE, gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, :], 1)
    total = gl.where(mine3 & (n3 == 0), gl.zeros([WARPS, 16, PAGE], gl.float32, SUMS) + 1.0, 0.0)
    if CODE == INT8:
        v0, v1 = v0 * VALUE_UNIT, v1 * VALUE_UNIT
    acc = (gl.where(mine3, v0, zero), gl.where(mine3, v1, zero))
    whole = (gl.minimum(end, position // PAGE) - begin) // AT_A_TIME
    stage = 0
    phase = 0
    for i in range(whole):
        acc, top, total = _advance(
            q, pages, units, full, stage, phase, 0, 0, acc, top, total, scale, False, WARPS, PAGES, SUMS, CODE
        )
        if i + STAGES < steps:
            gl.thread_barrier()
            page = begin + (i + STAGES) * AT_A_TIME
            _ask(
                cached, steps_of, ring, lines, full, stage, blocks, page, end, kv_head, block_stride,
                KV_HEADS, D, BT, AT_A_TIME, CODE,
            )  # fmt: skip
            blocks = _blocks(table, gl.minimum(page + AT_A_TIME, end - 1), end, BT, AT_A_TIME)
        wrap = stage == STAGES - 1
        phase = gl.where(wrap, phase ^ 1, phase)
        stage = gl.where(wrap, 0, stage + 1)
    if whole < steps:
        w3 = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None], 2)
        n = (begin + (whole * WARPS + w3) * PAGES) * PAGE + n3
        limit = gl.minimum(end * PAGE, position)
        acc, top, total = _advance(
            q, pages, units, full, stage, phase, n, limit, acc, top, total, scale, True, WARPS, PAGES, SUMS, CODE
        )
    total = gl.sum(total, 2)
    acc0, acc1 = acc
    M: gl.constexpr = 8 if GROUP_P <= 8 else 16
    if M == 8:
        # The other half of a tile's rows is nobody's.
        top, total = _eight2(top, WARPS), _eight2(total, WARPS)
        acc0, acc1 = _eight3(acc0, WARPS, HALF), _eight3(acc1, WARPS, HALF)
    # The warps' results into one.
    best = gl.max(top, 0)
    if WARPS > 1:
        by = gl.exp2(top - best[None, :])
        total *= by
        by3 = gl.expand_dims(gl.convert_layout(by, gl.SliceLayout(2, acc0.type.layout)), 2)
        acc0, acc1 = acc0 * by3, acc1 * by3
    total = gl.sum(total, 0)
    acc0, acc1 = gl.sum(acc0, 0), gl.sum(acc1, 0)
    divide = gl.convert_layout(total, gl.SliceLayout(1, acc0.type.layout))[:, None]
    if CODE == INT8:
        divide *= VALUE_UNIT
    result = _heads(acc0 / divide, acc1 / divide, CODE)
    ENDED: gl.constexpr = result.type.layout
    m_end = gl.arange(0, M, gl.SliceLayout(1, ENDED))[:, None]
    d_end = gl.arange(0, D, gl.SliceLayout(0, ENDED))[None, :]
    if used == 1:
        whole_at = out + row.to(gl.int64) * (HEADS * D) + (kv_head * GROUP + m_end) * D + d_end
        gl.store(whole_at, result.to(given), (m_end < GROUP) & (d_end >= 0))
    else:
        parts = (row * KV_HEADS + kv_head) * splits
        part_at = partial + ((parts + split) * GROUP_P + m_end) * D + d_end
        gl.store(part_at, result, (m_end < GROUP_P) & (d_end >= 0))
        g = gl.arange(0, M, best.type.layout)
        gl.store(lse + (parts + split) * GROUP_P + g, best + gl.log2(total), g < GROUP_P)
        gl.thread_barrier()
        counter = counters + (row * KV_HEADS + kv_head) * counter_stride
        if gl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            gl.thread_barrier()
            gl.store(counter, 0)
            merged, sums = _merged(partial, lse, parts, used, GROUP_P, D, AT_ONCE, PARTS)
            divided_by = gl.convert_layout(sums, gl.SliceLayout(1, gl.SliceLayout(0, PARTS)))[:, None]
            g_out = gl.arange(0, GROUP_P, gl.SliceLayout(1, gl.SliceLayout(0, PARTS)))[:, None]
            d_out = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(0, PARTS)))[None, :]
            out_at = out + row.to(gl.int64) * (HEADS * D) + (kv_head * GROUP + g_out) * D + d_out
            gl.store(out_at, (merged / divided_by).to(given), (g_out < GROUP) & (d_out >= 0))


def fits(capability: tuple[int, int], dtype: torch.dtype, dim: int, group: int, block_tokens: int) -> str | None:
    """Why this kernel cannot serve a model, or None."""
    if capability[0] != 9:
        return f"compute capability {capability[0]}.{capability[1]} has no bulk copies of this kind"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} is not bf16 or fp16"
    if dim not in (64, 128):
        return f"head dimension {dim} is neither 64 nor 128"
    if group > 16:
        return f"{group} query heads of a KV head are more than a tile's 16 rows"
    return (
        None if block_tokens % PAGE.value == 0 else f"blocks of {block_tokens} tokens are no multiple of {PAGE.value}"
    )


@cache
def _layouts(warps: int, dim: int, group_p: int, code: int) -> dict[str, object]:
    half = dim // 2
    at_once = max(1, MERGED * 32 * warps // (group_p * dim))
    return {
        "PAGED": gl.NVMMASharedLayout(2 * half, 16, rank=5 if code == PLAIN.value else 4),
        "BATCHED": gl.NVMMASharedLayout(2 * half, 16, rank=3),
        "LINES": gl.NVMMASharedLayout(0, 16, rank=1),
        "UNITS": gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0]),
        "TILE": gl.SliceLayout(0, gl.BlockedLayout([1, 1, 4], [1, 128 // half, half // 4], [1, warps, 1], [2, 1, 0])),
        "PARTS": gl.BlockedLayout([at_once, 1, 4], [1, 128 // dim, dim // 4], [1, warps, 1], [2, 1, 0]),
        "AT_ONCE": at_once,
    }


def decode_hopper(
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
    least: int = 4,
    cos_sin: torch.Tensor | None = None,
    rope_dim: int = 0,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    warps: int = 4,
    stages: int = 3,
    pages: int = 1,
    pdl: bool = False,
) -> None:
    """`decode_attention` of keys and values that `fits`, without windows, caps, sinks or shared prefixes, and not of INT4.

    A context's pages of `PAGE` tokens are dealt out evenly to up to `splits` programs, at least `least` to each. A warp takes
    `pages` at once; a ring has `stages` of as many for each of `warps`. Scales of INT8 lie within 2^31 numbers.
    """
    code, kv_heads, block_tokens, dim = geometry(kv, scales)
    group = heads // kv_heads
    group_p = power_of_2(group)
    given = _layouts(warps, dim, group_p, code)
    some = work.lse
    assert rope_dim in (0, dim)
    assert len(slots) * splits * kv_heads * group_p * dim <= work.partial.numel()
    if code == PLAIN.value:
        seen = kv.view(-1, 2, kv_heads * block_tokens, 2, dim // 2).transpose(2, 3)
        cached = TensorDescriptor.from_tensor(seen, [1, 2, 2, PAGE.value, dim // 2], given["PAGED"])
    else:
        seen = kv.view(-1, 2, kv_heads * block_tokens, dim // 2)
        cached = TensorDescriptor.from_tensor(seen, [1, 2, PAGE.value, dim // 2], given["PAGED"])
    steps = cached
    if scales is not None:
        # Behind the codes of one block lie those of the next: all from the first scale on are one line of numbers.
        count = len(scales) * scales.stride(0) - scales.storage_offset() % scales.stride(0)
        steps = TensorDescriptor.from_tensor(scales.as_strided((count,), (1,)), [LINE.value], given["LINES"])
    _decode_hopper[(kv_heads, len(slots), splits)](
        cached, steps, qkv, out, kv, kv if scales is None else scales, tables, slots, positions,
        some if q_norm is None else q_norm, some if k_norm is None else k_norm, some if cos_sin is None else cos_sin,
        work.partial, work.lse, work.counters, scale, eps, splits, least,
        qkv.stride(0), tables.stride(0), kv.stride(0), work.counter_stride,
        KV_HEADS=kv_heads, GROUP=group, GROUP_P=group_p, D=dim, BT=block_tokens, ROPE=rope_dim > 0, NORM=q_norm is not None,
        FUSED=cos_sin is not None, WARPS=warps, PAGES=pages, STAGES=stages, PDL=pdl, CODE=code, **given, num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
