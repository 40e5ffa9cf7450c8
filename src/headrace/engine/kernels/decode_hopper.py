"""Decode attention on Hopper cards that begins before the projection has ended: `decode` with bulk copies into a ring.

All but the newest of a context's keys and values were written in earlier steps. So a program looks up its blocks and asks for
as many as its ring holds before it waits for the kernel that makes queries; what follows the wait (rotation, the new token)
hides behind loads that are under way. A ring in shared memory needs no registers and no addresses from the threads that
compute, so that enough bytes are in flight: 4.5 TB/s times a latency of about a microsecond is 34 KB on each multiprocessor.

Each warp takes every WARPS-th page of PAGE tokens and has a softmax of its own: as a dimension of every tensor that lies across
warps, so that nothing is exchanged between them before the end. There they are merged, and then the programs of a context.

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

from headrace.engine.kernels.decode import DecodeWorkspace
from headrace.engine.kernels.launchers import power_of_2

PAGE = gl.constexpr(16)
"""Tokens that a warp takes at once; blocks are one or more of them."""
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
    cached, ring, full, stage, blocks, page, end, kv_head,
    KV_HEADS: gl.constexpr, D: gl.constexpr, BT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Bring the keys and values of WARPS pages to a stage, each page by one copy."""
    bar = full.index(stage)
    mbarrier.expect(bar, WARPS * 2 * PAGE * D * 2)
    for w in gl.static_range(WARPS):
        within = gl.minimum(page + w, end - 1) * PAGE % BT
        tma.async_copy_global_to_shared(
            cached, [blocks[w], 0, 0, kv_head * BT + within, 0], bar, ring.index(stage * WARPS + w)
        )


@gluon.jit
def _advance(
    q, pages, full, stage, phase, seen, acc, top, total, scale,
    MASKED: gl.constexpr, WARPS: gl.constexpr, HALF: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """A stage's pages into the softmaxes of all warps; `seen` [WARPS, 1, PAGE] counts if MASKED."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    kind: gl.constexpr = pages.dtype
    mbarrier.wait(full.index(stage), phase)
    here = pages.index(stage)
    turned = here.permute((0, 2, 1))
    k0 = turned.slice(0, PAGE, 2).load(RIGHT)
    k1 = turned.slice(PAGE, PAGE, 2).load(RIGHT)
    none = gl.zeros([WARPS, 16, PAGE], gl.float32, SUMS)
    scores = gl.nvidia.ampere.mma_v2(q[0], k0, none) + gl.nvidia.ampere.mma_v2(q[1], k1, none)
    if MASKED:
        scores = gl.where(seen, scores, float("-inf"))
    best = gl.maximum(top, gl.max(scores, 2) * scale)
    shrink = gl.exp2(top - best)
    weights = gl.exp2(scores * scale - gl.expand_dims(best, 2))
    # Added up over a row's threads at the end.
    total = total * gl.expand_dims(shrink, 2) + weights
    p = gl.convert_layout(weights.to(kind), gl.DotOperandLayout(0, SUMS, 2))
    v0 = here.slice(2 * PAGE, PAGE, 1).load(RIGHT)
    v1 = here.slice(3 * PAGE, PAGE, 1).load(RIGHT)
    if MASKED:
        # Beyond the context a block may hold anything, also no numbers.
        there = gl.convert_layout(gl.permute(seen, (0, 2, 1)), RIGHT)
        v0 = gl.where(there, v0, gl.zeros_like(v0))
        v1 = gl.where(there, v1, gl.zeros_like(v1))
    shrink = gl.expand_dims(shrink, 2)
    acc0 = gl.nvidia.ampere.mma_v2(p, v0, acc[0] * shrink)
    acc1 = gl.nvidia.ampere.mma_v2(p, v1, acc[1] * shrink)
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
    cached, qkv, out, kv, tables, slots, positions, q_norm, k_norm, cos_sin, partial, lse, counters,
    scale, eps, splits, least, qkv_stride, table_stride, counter_stride,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, GROUP_P: gl.constexpr, D: gl.constexpr, BT: gl.constexpr,
    ROPE: gl.constexpr, NORM: gl.constexpr, FUSED: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    AT_ONCE: gl.constexpr, PDL: gl.constexpr, PAGED: gl.constexpr, BATCHED: gl.constexpr, TILE: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = D // 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    HEADS: gl.constexpr = KV_HEADS * GROUP
    kind: gl.constexpr = qkv.dtype.element_ty
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
            nought = gl.zeros([GROUP_P, HALF], kind, TILE)
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
    # Of each page: halves of keys, then of values, each half of a vector 128 bytes, the widest swizzle.
    ring = gl.allocate_shared_memory(kind, [STAGES * WARPS, 1, 2, 2, PAGE, HALF], PAGED)
    pages = ring._reinterpret(kind, [STAGES, WARPS, 4 * PAGE, HALF], BATCHED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    steps = (end - begin + WARPS - 1) // WARPS
    ahead = ()
    for i in gl.static_range(STAGES + 1):
        ahead += (_blocks(table, gl.minimum(begin + i * WARPS, gl.maximum(end - 1, 0)), gl.maximum(end, 1), BT, WARPS),)
    for i in gl.static_range(STAGES):
        if i < steps:
            _ask(cached, ring, full, i, ahead[i], begin + i * WARPS, end, kv_head, KV_HEADS, D, BT, WARPS)
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
    k0, k1 = k0.to(kind), k1.to(kind)
    v_base = first + (HEADS + KV_HEADS + kv_head) * D
    if FUSED:
        block = gl.load(tables + slot * table_stride + position // BT).to(gl.int64)
        target = kv + ((block * (2 * KV_HEADS) + kv_head) * BT + position % BT) * D + d
        stored = one & (block >= 0)
        v_at = target + KV_HEADS * BT * D
        gl.store(target + m * 0, k0, stored)
        gl.store(target + HALF + m * 0, k1, stored)
        gl.store(v_at + m * 0, gl.load(v_base + d + m * 0), stored)
        gl.store(v_at + HALF + m * 0, gl.load(v_base + HALF + d + m * 0), stored)
    new = q0.to(gl.float32) * k0.to(gl.float32) + q1.to(gl.float32) * k1.to(gl.float32)
    new = _repeated(gl.sum(gl.expand_dims(new, 0), 2), GROUP_P)
    new = gl.convert_layout(new, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :]
    scale *= LOG2E
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None]
    mine = (warp == 0) & newest
    top = gl.where(mine, new * scale, NOTHING)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    none = gl.zeros([WARPS, 16, HALF], kind, LEFT)
    q0 = gl.expand_dims(gl.convert_layout(_repeated(gl.expand_dims(q0, 0), GROUP_P), gl.SliceLayout(0, LEFT)), 0)
    q1 = gl.expand_dims(gl.convert_layout(_repeated(gl.expand_dims(q1, 0), GROUP_P), gl.SliceLayout(0, LEFT)), 0)
    q = (gl.broadcast(q0, none)[0], gl.broadcast(q1, none)[0])
    dv = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, :], 1)
    zero = gl.zeros([WARPS, 16, HALF], gl.float32, SUMS)
    mine3 = gl.expand_dims(mine, 2)
    n3 = gl.expand_dims(gl.arange(0, PAGE, gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, :], 1)
    total = gl.where(mine3 & (n3 == 0), gl.zeros([WARPS, 16, PAGE], gl.float32, SUMS) + 1.0, 0.0)
    acc = (
        gl.where(mine3, gl.load(v_base + dv).to(gl.float32), zero),
        gl.where(mine3, gl.load(v_base + HALF + dv).to(gl.float32), zero),
    )
    whole = (gl.minimum(end, position // PAGE) - begin) // WARPS
    stage = 0
    phase = 0
    for i in range(whole):
        acc, top, total = _advance(q, pages, full, stage, phase, 0, acc, top, total, scale, False, WARPS, HALF, SUMS)
        if i + STAGES < steps:
            gl.thread_barrier()
            page = begin + (i + STAGES) * WARPS
            _ask(cached, ring, full, stage, blocks, page, end, kv_head, KV_HEADS, D, BT, WARPS)
            blocks = _blocks(table, gl.minimum(page + WARPS, end - 1), end, BT, WARPS)
        wrap = stage == STAGES - 1
        phase = gl.where(wrap, phase ^ 1, phase)
        stage = gl.where(wrap, 0, stage + 1)
    if whole < steps:
        w3 = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None], 2)
        n = (begin + whole * WARPS + w3) * PAGE + n3
        seen = n < gl.minimum(end * PAGE, position)
        acc, top, total = _advance(q, pages, full, stage, phase, seen, acc, top, total, scale, True, WARPS, HALF, SUMS)
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
    ENDED: gl.constexpr = acc0.type.layout
    m_end = gl.arange(0, M, gl.SliceLayout(1, ENDED))[:, None]
    d_end = gl.arange(0, HALF, gl.SliceLayout(0, ENDED))[None, :]
    divide = gl.convert_layout(total, gl.SliceLayout(1, ENDED))[:, None]
    acc0, acc1 = acc0 / divide, acc1 / divide
    if used == 1:
        whole_at = out + row.to(gl.int64) * (HEADS * D) + (kv_head * GROUP + m_end) * D + d_end
        m_inside = (m_end < GROUP) & (d_end >= 0)
        gl.store(whole_at, acc0.to(kind), m_inside)
        gl.store(whole_at + HALF, acc1.to(kind), m_inside)
    else:
        parts = (row * KV_HEADS + kv_head) * splits
        part_at = partial + ((parts + split) * GROUP_P + m_end) * D + d_end
        p_inside = (m_end < GROUP_P) & (d_end >= 0)
        gl.store(part_at, acc0, p_inside)
        gl.store(part_at + HALF, acc1, p_inside)
        g = gl.arange(0, M, best.type.layout)
        gl.store(lse + (parts + split) * GROUP_P + g, best + gl.log2(total), g < GROUP_P)
        gl.thread_barrier()
        counter = counters + (row * KV_HEADS + kv_head) * counter_stride
        if gl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            gl.thread_barrier()
            gl.store(counter, 0)
            result, sums = _merged(partial, lse, parts, used, GROUP_P, D, AT_ONCE, PARTS)
            divided_by = gl.convert_layout(sums, gl.SliceLayout(1, gl.SliceLayout(0, PARTS)))[:, None]
            g_out = gl.arange(0, GROUP_P, gl.SliceLayout(1, gl.SliceLayout(0, PARTS)))[:, None]
            d_out = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(0, PARTS)))[None, :]
            out_at = out + row.to(gl.int64) * (HEADS * D) + (kv_head * GROUP + g_out) * D + d_out
            gl.store(out_at, (result / divided_by).to(kind), (g_out < GROUP) & (d_out >= 0))


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
def _layouts(warps: int, dim: int, group_p: int) -> dict[str, object]:
    half = dim // 2
    at_once = max(1, MERGED * 32 * warps // (group_p * dim))
    return {
        "PAGED": gl.NVMMASharedLayout(2 * half, 16, rank=5),
        "BATCHED": gl.NVMMASharedLayout(2 * half, 16, rank=3),
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
    least: int = 4,
    cos_sin: torch.Tensor | None = None,
    rope_dim: int = 0,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    warps: int = 4,
    stages: int = 3,
    pdl: bool = False,
) -> None:
    """`decode_attention` of plain keys and values that `fits`, without windows, caps, sinks or shared prefixes.

    A context's pages of `PAGE` tokens are dealt out evenly to up to `splits` programs, at least `least` to each.
    """
    kv_heads, block_tokens, dim = kv.shape[2:]
    group = heads // kv_heads
    group_p = power_of_2(group)
    given = _layouts(warps, dim, group_p)
    some = work.lse
    assert rope_dim in (0, dim)
    assert len(slots) * splits * kv_heads * group_p * dim <= work.partial.numel()
    halves = kv.view(-1, 2, kv_heads * block_tokens, 2, dim // 2).transpose(2, 3)
    cached = TensorDescriptor.from_tensor(halves, [1, 2, 2, PAGE.value, dim // 2], given["PAGED"])
    _decode_hopper[(kv_heads, len(slots), splits)](
        cached, qkv, out, kv, tables, slots, positions, some if q_norm is None else q_norm, some if k_norm is None else k_norm,
        some if cos_sin is None else cos_sin, work.partial, work.lse, work.counters, scale, eps, splits, least,
        qkv.stride(0), tables.stride(0), work.counter_stride,
        KV_HEADS=kv_heads, GROUP=group, GROUP_P=group_p, D=dim, BT=block_tokens, ROPE=rope_dim > 0, NORM=q_norm is not None,
        FUSED=cos_sin is not None, WARPS=warps, STAGES=stages, PDL=pdl, **given, num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
