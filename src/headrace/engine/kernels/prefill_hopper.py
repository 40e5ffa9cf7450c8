"""Attention of long prompt chunks on Hopper cards: the tiles of `prefill`, with their work divided among warps.

One warp loads (bulk tensor copies into a ring in shared memory), two groups of four warps compute 64 queries each. A group's
tensor-core products are asynchronous: scores of the next keys are under way while this block's weights are made. The groups
issue their products by turns, so that one's exponentials hide behind the other's products. Programs stay resident
and take tiles one after the other, the longest first, in serpentine order.

Bulk copies need keys that lie in rows: those of earlier steps are gathered from their blocks first (`gather`), which costs
a pass over them; a chunk's own lie in the projection's output already.

Few queries over many keys make too few tiles for the card. Their cached keys are then cut into parts, each a unit of its
own, whose results a small kernel merges by their log-sum-exp.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.engine.kernels.prefill import HOPPER_TILE as TILE

STAGES = 2
MERGED_ROWS = 32
"""Queries that a program merges the parts of."""


@gluon.jit
def _unit(turn, programs, heads, parts, tiles, chunks, offsets, SPLIT: gl.constexpr):
    """The turn's unit of a program: head, first row of the chunk, first query, its length, cached keys, their first row; its
    part of these keys, and its number among all units."""
    program = gl.program_id(0)
    unit = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    index, part = unit, unit * 0
    if SPLIT:
        index, part = unit // parts, unit % parts
    tile = index // heads
    chunk = gl.load(tiles + 2 * tile)
    m0 = gl.load(tiles + 2 * tile + 1)
    start = gl.load(chunks + 4 * chunk + 1)
    length = gl.load(chunks + 4 * chunk + 2)
    row0 = gl.load(chunks + 4 * chunk + 3)
    offset = gl.load(offsets + chunk)
    return index % heads, row0, m0, length, start, offset, part, unit


@gluon.jit
def _turns(units, programs):
    """How many units this program has."""
    program = gl.program_id(0)
    whole = units // programs
    place = gl.where(whole % 2 == 0, program, programs - 1 - program)
    return whole + (place < units % programs).to(gl.int32)


@gluon.jit
def _produce(
    qkv_rows, qkv_keys, cached, tiles, chunks, offsets, units, programs, parts, q_s, k_s, v_s,
    q_full, q_free, k_full, k_free, v_full, v_free,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    GROUP: gl.constexpr = HEADS // KV_HEADS
    block_bytes: gl.constexpr = BLOCK * D * 2
    at = 0
    for turn in range(_turns(units, programs)):
        head, row0, m0, _, start, offset, part, _ = _unit(turn, programs, HEADS, parts, tiles, chunks, offsets, SPLIT)
        kv_head = head // GROUP
        mbarrier.wait(q_free, (turn + 1) & 1)
        mbarrier.expect(q_full, block_bytes)
        tma.async_copy_global_to_shared(qkv_rows, [row0 + m0, head * D], q_full, q_s.index(0))
        tma.async_copy_global_to_shared(qkv_rows, [row0 + m0 + BLOCK // 2, head * D], q_full, q_s.index(1))
        own = m0 // BLOCK + 1
        blocks = own + (start + BLOCK - 1) // BLOCK
        first, last = 0, blocks
        if SPLIT:
            # The first part has the chunk's own keys besides.
            old = blocks - own
            first = gl.where(part == 0, 0, own + part * old // parts)
            last = own + (part + 1) * old // parts
        for j in range(first, last):
            fresh = j < own
            row = gl.where(fresh, row0 + (own - 1 - j) * BLOCK, offset + (blocks - 1 - j) * BLOCK)
            stage = at % STAGES
            phase = (at // STAGES + 1) & 1
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_full.index(stage), block_bytes)
            tma.async_copy_global_to_shared(
                qkv_keys, [row, (HEADS + kv_head) * D], k_full.index(stage), k_s.index(stage), pred=fresh
            )
            tma.async_copy_global_to_shared(
                cached, [row, kv_head * D], k_full.index(stage), k_s.index(stage), pred=j >= own
            )
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_full.index(stage), block_bytes)
            tma.async_copy_global_to_shared(
                qkv_keys, [row, (HEADS + KV_HEADS + kv_head) * D], v_full.index(stage), v_s.index(stage), pred=fresh
            )
            tma.async_copy_global_to_shared(
                cached, [row, (KV_HEADS + kv_head) * D], v_full.index(stage), v_s.index(stage), pred=j >= own
            )
            at += 1


@gluon.jit
def _cleared(v_s, inside, BLOCK: gl.constexpr, D: gl.constexpr):
    """Zero the rows of a value block from `inside` on: another sequence's, which may hold anything, also no numbers."""
    PIECE: gl.constexpr = 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, PIECE, gl.SliceLayout(1, layout))
    for i in gl.static_range(BLOCK // PIECE):
        piece = v_s.slice(i * PIECE, PIECE)
        values = piece.load(layout)
        piece.store(gl.where((i * PIECE + rows < inside)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def _own_turn(thread, HALF: gl.constexpr):
    """Wait for the turn of this half's four warps, by a barrier of their own; `thread` [128] makes it one instruction each."""
    if HALF == 0:
        gl.inline_asm_elementwise(
            "bar.sync 12, 256; mov.u32 $0, $1;", "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            "bar.sync 14, 256; mov.u32 $0, $1;", "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _others_turn(thread, HALF: gl.constexpr):
    """Let the other half go on; both have equally many turns."""
    if HALF == 0:
        gl.inline_asm_elementwise(
            "bar.arrive 14, 256; mov.u32 $0, $1;", "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            "bar.arrive 12, 256; mov.u32 $0, $1;", "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _advance(
    q, k_s, v_s, k_full, k_free, v_full, v_free, nothing, acc, top, total, weights, at, scale, zero, thread, seen,
    HALF: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Score block `at` + 1 of keys while block `at` of values is added with its weights.

    The halves issue their products by turns: what one issues runs while the other makes weights. Weights go round the loop
    as fp32: of 16 bits each would be unpacked and packed again, one by one.
    """
    p = _operand(weights, acc, v_s.dtype)
    before, before_phase = at % STAGES, (at // STAGES) & 1
    at += 1
    stage = at % STAGES
    mbarrier.wait(k_full.index(stage), (at // STAGES) & 1)
    _own_turn(thread, HALF)
    scoring = warpgroup_mma(q, k_s.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), before_phase)
    adding = warpgroup_mma(p, v_s.index(before), acc, is_async=True)
    _others_turn(thread, HALF)
    scores = warpgroup_mma_wait(1, deps=[scoring])
    mbarrier.arrive(k_free.index(stage))
    if not isinstance(seen, gl.constexpr):
        scores = gl.where(seen, scores, float("-inf"))
    best = gl.maximum(top, _greatest(scores) * scale)
    shrink = gl.exp2(top - best)
    weights = gl.exp2(scores * scale - best[:, None])
    total = total * shrink + gl.sum(weights, 1)
    # The compiler would move the wait ahead of the exponentials, and nothing would overlap with the products. Barriers keep
    # their place, so one whose number depends on the sums, by a zero unknown to the compiler, holds the wait back.
    if HALF == 0:
        total = gl.inline_asm_elementwise(
            "{ .reg .b32 t; or.b32 t, $2, $3; and.b32 t, t, $4; add.u32 t, t, 8; bar.sync t, 128; "
            "mov.b32 $0, $2; mov.b32 $1, $3; }",
            "=r,=r,r,r,r,r", [total, zero], dtype=gl.float32, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        total = gl.inline_asm_elementwise(
            "{ .reg .b32 t; or.b32 t, $2, $3; and.b32 t, t, $4; add.u32 t, t, 10; bar.sync t, 128; "
            "mov.b32 $0, $2; mov.b32 $1, $3; }",
            "=r,=r,r,r,r,r", [total, zero], dtype=gl.float32, is_pure=False, pack=2,
        )  # fmt: skip
    acc, weights, total = warpgroup_mma_wait(0, deps=[adding, weights, total])
    mbarrier.arrive(v_free.index(before))
    return _shrunk(acc, shrink), best, total, weights, at


@gluon.jit
def _shrunk(acc, shrink):
    return acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def _operand(weights, acc, kind: gl.constexpr):
    """Weights as the left operand of their product with values."""
    WEIGHING: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return gl.convert_layout(weights.to(kind), WEIGHING)


@gluon.jit
def _greatest(scores):
    """The greatest of each row, by two chains of comparisons: one after the other they would take twice as long."""
    a, b = scores.reshape([scores.shape[0], 2, scores.shape[1] // 2]).permute([0, 2, 1]).split()
    found = gl.max(gl.maximum(a, b), 1)
    return gl.convert_layout(found, gl.SliceLayout(1, scores.type.layout), assert_trivial=True)


@gluon.jit
def _consume(
    HALF: gl.constexpr, out, partial, lse, tiles, chunks, offsets, units, programs, parts, scale, q_s, k_s, v_s,
    q_full, q_free, k_full, k_free, v_full, v_free,
    HEADS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BLOCK // 2
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    m_rel = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, scored))
    n_rel = gl.arange(0, BLOCK, gl.SliceLayout(0, scored))
    nothing = gl.zeros([ROWS, BLOCK], gl.float32, scored)
    q = q_s.index(HALF)
    zero = units >> 31
    thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    if HALF == 1:
        # The first half goes first.
        _others_turn(thread, HALF)
    at = 0
    for turn in range(_turns(units, programs)):
        head, row0, m0, length, start, _, part, unit = _unit(
            turn, programs, HEADS, parts, tiles, chunks, offsets, SPLIT
        )
        own = m0 // BLOCK + 1
        old = (start + BLOCK - 1) // BLOCK
        ragged = min(old, 1)
        diagonal, ending = m_rel, length - m0
        if SPLIT:
            ragged = gl.where(part == 0, ragged, 0)
            # Beyond the first part there is no diagonal: its first block is one of cached keys, all of which are seen.
            own = gl.where(part == 0, own, 0)
            diagonal = gl.where(part == 0, m_rel, m_rel + BLOCK)
            ending = gl.where(part == 0, ending, BLOCK)
        mbarrier.wait(q_full, turn & 1)
        # The block that the diagonal crosses.
        stage = at % STAGES
        phase = (at // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        scores = warpgroup_mma(q, k_s.index(stage).permute((1, 0)), nothing, use_acc=False)
        mbarrier.arrive(k_free.index(stage))
        scores = gl.where(n_rel[None, :] <= diagonal[:, None], scores, float("-inf"))
        top = gl.max(scores, 1) * scale
        weights = gl.exp2(scores * scale - top[:, None])
        total = gl.sum(weights, 1)
        acc = gl.zeros([ROWS, D], gl.float32, summed)
        if ending < BLOCK:
            mbarrier.wait(v_full.index(stage), phase)
            _cleared(v_s.index(stage), ending, BLOCK, D)
        for _ in range(1, own):
            acc, top, total, weights, at = _advance(
                q, k_s, v_s, k_full, k_free, v_full, v_free, nothing, acc, top, total, weights, at, scale, zero, thread, True, HALF, STAGES
            )  # fmt: skip
        # The last block of cached keys comes first and may be ragged.
        for _ in range(ragged):
            there = (n_rel < start - (old - 1) * BLOCK)[None, :]
            acc, top, total, weights, at = _advance(
                q, k_s, v_s, k_full, k_free, v_full, v_free, nothing, acc, top, total, weights, at, scale, zero, thread, there, HALF, STAGES
            )  # fmt: skip
        first, last = 0, old
        if SPLIT:
            first, last = part * old // parts, (part + 1) * old // parts
        for _ in range(first + 1, last):
            acc, top, total, weights, at = _advance(
                q, k_s, v_s, k_full, k_free, v_full, v_free, nothing, acc, top, total, weights, at, scale, zero, thread, True, HALF, STAGES
            )  # fmt: skip
        mbarrier.arrive(q_free)
        stage = at % STAGES
        mbarrier.wait(v_full.index(stage), (at // STAGES) & 1)
        acc = warpgroup_mma(_operand(weights, acc, v_s.dtype), v_s.index(stage), acc)
        mbarrier.arrive(v_free.index(stage))
        at += 1
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, summed))[:, None]
        whole = True
        if SPLIT:
            whole = parts == 1
            if parts > 1:
                m_sum = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, summed))
                d_sum = gl.arange(0, D, gl.SliceLayout(0, summed))
                gl.store(partial + (unit * BLOCK + m_sum)[:, None] * D + d_sum[None, :], acc)
                gl.store(lse + unit * BLOCK + m_rel, top + gl.log2(total))
        if whole:
            result = gl.convert_layout(acc.to(out.dtype.element_ty), stored)
            m = m0 + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, stored))
            d = gl.arange(0, D, gl.SliceLayout(0, stored))
            target = out + (row0 + m).to(gl.int64)[:, None] * (HEADS * D) + head * D + d[None, :]
            gl.store(target, result, (m < length)[:, None])


@gluon.jit(do_not_specialize=["units", "programs"])
def _prefill_hopper(
    qkv_rows, qkv_keys, cached, out, partial, lse, tiles, chunks, offsets, counts, units, programs, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    parts = units
    if SPLIT:
        parts = gl.load(counts + 1)
        units = HEADS * gl.load(counts) * parts
    q_s = gl.allocate_shared_memory(qkv_rows.dtype, [2, BLOCK // 2, D], qkv_rows.layout)
    k_s = gl.allocate_shared_memory(qkv_rows.dtype, [STAGES, BLOCK, D], qkv_keys.layout)
    v_s = gl.allocate_shared_memory(qkv_rows.dtype, [STAGES, BLOCK, D], qkv_keys.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    scale *= 1.4426950408889634
    gl.warp_specialize(
        [
            (
                _first_half,
                (
                    out, partial, lse, tiles, chunks, offsets, units, programs, parts, scale, q_s, k_s, v_s,
                    q_full, q_free, k_full, k_free, v_full, v_free, HEADS, D, BLOCK, STAGES, SPLIT,
                ),
            ),
            (
                _second_half,
                (
                    out, partial, lse, tiles, chunks, offsets, units, programs, parts, scale, q_s, k_s, v_s,
                    q_full, q_free, k_full, k_free, v_full, v_free, HEADS, D, BLOCK, STAGES, SPLIT,
                ),
            ),
            (
                _produce,
                (
                    qkv_rows, qkv_keys, cached, tiles, chunks, offsets, units, programs, parts, q_s, k_s, v_s,
                    q_full, q_free, k_full, k_free, v_full, v_free, HEADS, KV_HEADS, D, BLOCK, STAGES, SPLIT,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _first_half(
    out, partial, lse, tiles, chunks, offsets, units, programs, parts, scale, q_s, k_s, v_s,
    q_full, q_free, k_full, k_free, v_full, v_free,
    HEADS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    _consume(
        0, out, partial, lse, tiles, chunks, offsets, units, programs, parts, scale, q_s, k_s, v_s,
        q_full, q_free, k_full, k_free, v_full, v_free, HEADS, D, BLOCK, STAGES, SPLIT,
    )  # fmt: skip


@gluon.jit
def _second_half(
    out, partial, lse, tiles, chunks, offsets, units, programs, parts, scale, q_s, k_s, v_s,
    q_full, q_free, k_full, k_free, v_full, v_free,
    HEADS: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    _consume(
        1, out, partial, lse, tiles, chunks, offsets, units, programs, parts, scale, q_s, k_s, v_s,
        q_full, q_free, k_full, k_free, v_full, v_free, HEADS, D, BLOCK, STAGES, SPLIT,
    )  # fmt: skip


@triton.jit
def _merge_parts(
    partial, lse, out, tiles, chunks, counts, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0)
    tile, head = index // HEADS, index % HEADS
    parts = tl.load(counts + 1)
    if parts == 1 or tile >= tl.load(counts):
        return
    chunk = tl.load(tiles + 2 * tile)
    m0 = tl.load(tiles + 2 * tile + 1)
    length = tl.load(chunks + 4 * chunk + 2)
    row0 = tl.load(chunks + 4 * chunk + 3)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for p in range(parts):
        at = (index * parts + p) * BLOCK + r
        part_lse = tl.load(lse + at)
        part = tl.load(partial + at[:, None] * D + d[None, :])
        best = tl.maximum(top, part_lse)
        shrink, weight = tl.exp2(top - best), tl.exp2(part_lse - best)
        acc = acc * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        top = best
    m = m0 + r
    target = out + (row0 + m).to(tl.int64)[:, None] * (HEADS * D) + head * D + d[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), (m < length)[:, None])


class Parts:
    """Results of parts of tiles until they are merged; shared by all layers."""

    def __init__(self, programs: int, dim: int, device: torch.device) -> None:
        """Room for as many units as there are `programs`, which is when parts pay."""
        self.programs = programs
        self.partial = torch.empty(programs * TILE * dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(programs * TILE, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self.partial.nbytes + self.lse.nbytes


def fits(capability: tuple[int, int], dtype: torch.dtype, dim: int, plain: bool) -> str | None:
    """Why these kernels cannot serve a model, or None. `plain`: no window, soft cap or sinks anywhere."""
    if capability[0] != 9:
        return f"compute capability {capability[0]}.{capability[1]} has no warp-group products"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} is not bf16 or fp16"
    if dim not in (64, 128):
        return f"head dimension {dim} is neither 64 nor 128"
    return None if plain else "windows, soft caps and sinks are not covered"


@cache
def _shared(rows: int, dim: int, kind: gl.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, dim], kind)


def prefill_hopper(
    qkv: torch.Tensor,
    out: torch.Tensor,
    cached: torch.Tensor,
    chunks: torch.Tensor,
    tiles: torch.Tensor,
    offsets: torch.Tensor,
    heads: int,
    kv_heads: int,
    *,
    scale: float,
    programs: int,
    counts: torch.Tensor | None = None,
    work: Parts | None = None,
) -> None:
    """`prefill_attention` with tiles of `TILE` queries for bf16 or fp16 heads of 64 or 128 dimensions.

    `cached` [rows, 2 * kv_heads * dim]: keys and values of earlier steps as `gather_rows` leaves them, those of chunk i from
    row `offsets[i]` on (a multiple of `TILE`). `programs`: the card's multiprocessors. A chunk's row, start and first query
    of each tile count as in `prefill_attention`.

    With `counts` [2] int32 the device says how much there is to do, so that a captured launch serves any step: how many of
    `tiles` count, and the parts that each tile's cached keys are cut into. More than one part needs every chunk to have as
    many blocks of `TILE` cached keys, and tiles * heads * parts within `work.programs`.
    """
    dim = cached.shape[1] // (2 * kv_heads)
    kind = gl.bfloat16 if qkv.dtype == torch.bfloat16 else gl.float16
    half, whole = [TILE // 2, dim], [TILE, dim]
    layout = _shared(TILE, dim, kind)
    units = heads * len(tiles)
    count = min(programs, units) if counts is None else programs
    places = (out, out, tiles) if counts is None else (work.partial, work.lse, counts)
    _prefill_hopper[(count,)](
        TensorDescriptor.from_tensor(qkv, half, _shared(TILE // 2, dim, kind)),
        TensorDescriptor.from_tensor(qkv, whole, layout), TensorDescriptor.from_tensor(cached, whole, layout),
        out, *places[:2], tiles, chunks, offsets, places[2], units, count, scale,
        HEADS=heads, KV_HEADS=kv_heads, D=dim, BLOCK=TILE, STAGES=STAGES, SPLIT=counts is not None, num_warps=4,
    )  # fmt: skip
    if counts is not None and (most := work.programs // (2 * heads)):
        _merge_parts[(heads * min(most, len(tiles)), TILE // MERGED_ROWS)](
            *places[:2], out, tiles, chunks, counts, HEADS=heads, D=dim, BLOCK=TILE, ROWS=MERGED_ROWS, num_warps=4
        )
