"""Products of 33 to 256 rows on Hopper cards, with the work around them fused in as in `gemm`.

From 33 rows on a product is bound by how fast weights come to the multiprocessors, and at 256 rows by the tensor cores too;
either way nothing may stop while a tile ends or a kernel does. One program stays on each multiprocessor. One of its warps only
loads: bulk copies of weights and of x into a ring in shared memory as deep as fits. Groups of four warps multiply, each 64 or
128 rows by up to 256 outputs, asynchronously (`wgmma`). Tiles times blocks of the inner dimension are one line of units, cut
into as many equal pieces as there are programs, so that none idles at the end. Who begins a tile finishes it: the programs that
have the rest of it leave their sums in memory, in fp32, most of them at their own begin, long before they are wanted; they are
added in the order of the inner dimension, so that a result depends on nobody's speed.

Weights depend on nobody: the ring is filled with them before the program waits for the kernel that makes x, and since a
program only starts where one of the kernel before has ended, that kernel's last sums and stores hide behind those loads.

Written in Gluon, Triton's language with explicit layouts. Gluon has no interpreter: formulas are the reference.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
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

from headrace.engine.kernels.activation import act
from headrace.engine.kernels.gemm import MAX_ROWS, Fused, Gained, GemmConfig, GemmWorkspace, rows_read, sizes, unfit

BLOCK_K = 64
"""Inner elements of a block: 128 bytes, the widest swizzle."""
LEAD = 16
"""A cut within a tile comes late by a sixteenth of what a program has to do."""
REGISTERS = {1: 240, 2: 240, 3: 160}
"""A thread's, by the groups of warps that multiply."""


@gluon.jit
def first_unit(program, units, programs, blocks, lead):
    """Where a program's piece of the line of units begins; it ends where the next one's begins.

    A cut within a tile comes `lead` units late: who finishes the tile has that much more to do than who leaves it a part.
    """
    unit = program * units // programs
    return unit + (unit % blocks != 0) * lead


@gluon.jit
def owner(unit, units, programs, blocks, lead):
    """The program whose piece holds a unit."""
    program = ((unit + 1) * programs - 1) // units
    return program - (unit < first_unit(program, units, programs, blocks, lead))


@gluon.jit
def _produce(
    x, w, x_s, w_s, full, free, begin, end, blocks, columns,
    M: gl.constexpr, N: gl.constexpr, ROW_GROUPS: gl.constexpr, COLUMN_GROUPS: gl.constexpr, ROW_TILES: gl.constexpr,
    K: gl.constexpr, STAGES: gl.constexpr, PAIR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = (COLUMN_GROUPS * N + ROW_GROUPS * M) * K * 2
    count = end - begin
    first = gl.minimum(count, STAGES)
    # fmt: off
    for i in range(first):
        mbarrier.expect(full.index(i), BYTES)
        _weights(w, w_s, i, full.index(i), begin + i, blocks, columns, N, COLUMN_GROUPS, ROW_TILES, K, PAIR)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in range(first):
        _rows(x, x_s, i, full.index(i), begin + i, blocks, M, ROW_GROUPS, ROW_TILES, K)
    stage = 0
    phase = 0
    for i in range(STAGES, count):
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(full.index(stage), BYTES)
        _weights(w, w_s, stage, full.index(stage), begin + i, blocks, columns, N, COLUMN_GROUPS, ROW_TILES, K, PAIR)
        _rows(x, x_s, stage, full.index(stage), begin + i, blocks, M, ROW_GROUPS, ROW_TILES, K)
        wrap = stage == STAGES - 1
        phase = gl.where(wrap, phase ^ 1, phase)
        stage = gl.where(wrap, 0, stage + 1)
    # fmt: on


@gluon.jit
def _weights(
    w, w_s, stage, barrier, unit, blocks, columns,
    N: gl.constexpr, COLUMN_GROUPS: gl.constexpr, ROW_TILES: gl.constexpr, K: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Ask for a unit's weights; of pairs each group of warps gets as many rows of the second half as of the first."""
    tile = unit // blocks
    k = (unit - tile * blocks) * K
    group = tile // ROW_TILES * COLUMN_GROUPS
    for c in gl.static_range(COLUMN_GROUPS):
        target = w_s.index(stage * COLUMN_GROUPS + c)
        if PAIR:
            row = (group + c) * (N // 2)
            tma.async_copy_global_to_shared(w, [row, k], barrier, target.slice(0, N // 2))
            tma.async_copy_global_to_shared(w, [columns + row, k], barrier, target.slice(N // 2, N // 2))
        else:
            tma.async_copy_global_to_shared(w, [(group + c) * N, k], barrier, target)


@gluon.jit
def _rows(
    x,
    x_s,
    stage,
    barrier,
    unit,
    blocks,
    M: gl.constexpr,
    ROW_GROUPS: gl.constexpr,
    ROW_TILES: gl.constexpr,
    K: gl.constexpr,
):
    """Ask for a unit's part of x."""
    tile = unit // blocks
    k = (unit - tile * blocks) * K
    for r in gl.static_range(ROW_GROUPS):
        row = (tile % ROW_TILES * ROW_GROUPS + r) * M
        tma.async_copy_global_to_shared(x, [row, k], barrier, x_s.index(stage * ROW_GROUPS + r))


@gluon.jit
def _squares(squares, count, row, rows, M: gl.constexpr, AT_ONCE: gl.constexpr, SQUARED: gl.constexpr):
    """The partial sums of squares [count, M] of rows from `row` on, as [AT_ONCE, M]."""
    m = row + gl.arange(0, M, gl.SliceLayout(0, SQUARED))
    t = gl.arange(0, AT_ONCE, gl.SliceLayout(1, SQUARED))[:, None]
    at = squares + (t * MAX_ROWS + m[None, :])
    inside = (m < rows)[None, :]
    found = gl.load(at, (t < count) & inside, 0.0)
    for t0 in range(AT_ONCE, count, AT_ONCE):
        found += gl.load(at + t0 * MAX_ROWS, (t0 + t < count) & inside, 0.0)
    return found


@gluon.jit
def _in_order(acc, M: gl.constexpr, N: gl.constexpr):
    """The sums [M, N] as [M N / 4, 4] in the order in which threads hold them: a warp's neighbouring 512 bytes at once.

    As rows of outputs they would go to memory in pieces of 32 bytes, which takes four times as long.
    """
    acc = acc.reshape([M // 64, 4, 2, 8, N // 8, 4, 2]).permute([0, 1, 4, 3, 5, 2, 6])
    return acc.reshape([M * N // 4, 4])


@gluon.jit
def _in_part(flat, M: gl.constexpr, N: gl.constexpr):
    """Where each of `_in_order` lies in its part."""
    LAYOUT: gl.constexpr = flat.type.layout
    at = gl.arange(0, M * N // 4, gl.SliceLayout(1, LAYOUT))[:, None] * 4
    return at + gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _as_sums(flat, M: gl.constexpr, N: gl.constexpr, SUMS: gl.constexpr):
    """`_in_order` undone."""
    acc = flat.reshape([M // 64, 4, N // 8, 8, 4, 2, 2]).permute([0, 1, 5, 3, 2, 4, 6])
    return gl.convert_layout(acc.reshape([M, N]), SUMS, assert_trivial=True)


@gluon.jit
def _consume(WHO: gl.constexpr, given, ring, WAY: gl.constexpr):
    """The part of a group of four warps: multiply what the ring brings, and what follows a whole tile."""
    M: gl.constexpr = WAY[0]
    N: gl.constexpr = WAY[1]
    GROUPS: gl.constexpr = WAY[2]
    COLUMN_GROUPS: gl.constexpr = WAY[3]
    ROW_TILES: gl.constexpr = WAY[4]
    STAGES: gl.constexpr = WAY[5]
    NORM: gl.constexpr = WAY[6]
    PAIR: gl.constexpr = WAY[7]
    ACT: gl.constexpr = WAY[8]
    BIAS: gl.constexpr = WAY[9]
    RESIDUAL: gl.constexpr = WAY[10]
    GAIN: gl.constexpr = WAY[11]
    PDL: gl.constexpr = WAY[12]
    STORED: gl.constexpr = WAY[13]
    x_s, w_s, full, free, begin, end, blocks, units, programs, lead = ring
    (
        bias, squares, gain, residual, out, gained, squares_out, parts, counters, rows, columns, inner, count, eps, scale,
        out_stride,
    ) = given  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    SQUARED: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    ROW_GROUPS: gl.constexpr = GROUPS // COLUMN_GROUPS
    ROW_GROUP: gl.constexpr = WHO // COLUMN_GROUPS
    COLUMN_GROUP: gl.constexpr = WHO % COLUMN_GROUPS
    N_OUT: gl.constexpr = N // (2 if PAIR else 1)
    EARLY: gl.constexpr = M * N * GROUPS <= 16384
    SQUARES: gl.constexpr = 2048 // M
    AT_ONCE: gl.constexpr = 16384 // (M * N) if EARLY else 1
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Sums of squares are asked for now and added up at the end.
    squared = gl.zeros([SQUARES, M], gl.float32, SQUARED)
    if NORM and ROW_TILES == 1:
        squared = _squares(squares, count, ROW_GROUP * M, rows, M, SQUARES, SQUARED)
    stage = 0
    phase = 0
    unit = begin
    for _ in range((end - 1) // blocks - begin // blocks + 1):
        tile = unit // blocks
        start = unit - tile * blocks
        steps = gl.minimum(blocks - start, end - unit)
        row = (tile % ROW_TILES * ROW_GROUPS + ROW_GROUP) * M
        column_tile = tile // ROW_TILES * COLUMN_GROUPS + COLUMN_GROUP
        column = column_tile * N_OUT
        m_out = row + gl.arange(0, M, gl.SliceLayout(1, STORED))
        n_out = column + gl.arange(0, N_OUT, gl.SliceLayout(0, STORED))
        inside = (m_out < rows)[:, None] & (n_out >= 0)[None, :]
        target = m_out[:, None] * out_stride + n_out[None, :]
        # What is added at a tile's end is asked for at its begin if there are registers for it.
        old, by = target, n_out
        if EARLY and RESIDUAL:
            old = gl.load(residual + target, inside & (start == 0), 0.0)
        if EARLY and GAIN:
            by = gl.load(gain + n_out)
        acc = gl.zeros([M, N], gl.float32, SUMS)
        for i in range(steps):
            mbarrier.wait(full.index(stage), phase)
            acc = warpgroup_mma(
                x_s.index(stage * ROW_GROUPS + ROW_GROUP), w_s.index(stage * COLUMN_GROUPS + COLUMN_GROUP).permute((1, 0)),
                acc, is_async=True,
            )  # fmt: skip
            acc = warpgroup_mma_wait(1, deps=[acc])
            # The stage before is worked out each time: a name that repeats another's value would not be carried round the loop.
            mbarrier.arrive(free.index(gl.where(stage == 0, STAGES - 1, stage - 1)), pred=i > 0)
            wrap = stage == STAGES - 1
            phase = gl.where(wrap, phase ^ 1, phase)
            stage = gl.where(wrap, 0, stage + 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
        program = gl.program_id(0)
        if start > 0:
            # The tile began with another program, which finishes it.
            flat = _in_order(acc, M, N)
            gl.store(parts + ((program * GROUPS + WHO).to(gl.int64) * (M * N) + _in_part(flat, M, N)), flat)
            gl.thread_barrier()
            gl.atomic_add(counters + (tile * GROUPS + WHO), 1, sem="release")
        else:
            if steps < blocks:
                flat = _in_order(acc, M, N)
                in_part = _in_part(flat, M, N)
                last = owner(tile * blocks + blocks - 1, units, programs, blocks, lead)
                # All programs are on the card, and parts that others leave wait for nobody.
                while gl.atomic_add(counters + (tile * GROUPS + WHO), 0, sem="acquire") < last - program:
                    pass
                gl.thread_barrier()
                gl.store(counters + (tile * GROUPS + WHO), 0)
                for p in range(program + 1, last + 1, AT_ONCE):
                    got = ()
                    for j in gl.static_range(AT_ONCE):
                        at = ((p + j) * GROUPS + WHO).to(gl.int64) * (M * N) + in_part
                        got += (gl.load(parts + at, (p + j <= last) & (in_part >= 0), 0.0, cache_modifier=".cg"),)
                    for j in gl.static_range(AT_ONCE):
                        flat += got[j]
                acc = _as_sums(flat, M, N, SUMS)
            if NORM:
                if ROW_TILES > 1:
                    squared = _squares(squares, count, row, rows, M, SQUARES, SQUARED)
                shrink = gl.rsqrt(gl.sum(squared, 0) / inner + eps)
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
            if BIAS:
                n_in = column + gl.arange(0, N, gl.SliceLayout(0, SUMS))
                if PAIR:
                    n_in = gl.where(n_in < column + N // 2, n_in, n_in + (columns - N // 2))
                acc += gl.load(bias + n_in).to(gl.float32)[None, :]
            if PAIR:
                gate, up = acc.reshape([M, 2, N // 2]).permute([0, 2, 1]).split()
                result = gl.convert_layout(act(gate, ACT) * up, STORED)
            else:
                result = gl.convert_layout(acc, STORED)
            if RESIDUAL:
                if EARLY:
                    result = result * scale + old.to(gl.float32)
                else:
                    result = result * scale + gl.load(residual + target, inside, 0.0).to(gl.float32)
            rounded = result.to(out.dtype.element_ty)
            gl.store(out + target, rounded, inside)
            if GAIN:
                wide = gl.where(inside, rounded.to(gl.float32), 0.0)
                at = squares_out + column_tile * MAX_ROWS
                gl.store(at + m_out, gl.sum(wide * wide, 1), m_out < rows)
                if EARLY:
                    wide = wide * by.to(gl.float32)[None, :]
                else:
                    wide = wide * gl.load(gain + n_out).to(gl.float32)[None, :]
                gl.store(gained + target, wide.to(out.dtype.element_ty), inside)
        unit += steps


@gluon.jit(do_not_specialize=["rows", "eps", "scale", "count", "lead"])
def kernel(
    x, w, bias, squares, gain, residual, out, gained, squares_out, parts, counters,
    rows, columns, inner, count, eps, scale, out_stride, lead,
    M: gl.constexpr, N: gl.constexpr, ROW_GROUPS: gl.constexpr, COLUMN_GROUPS: gl.constexpr, ROW_TILES: gl.constexpr,
    K: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    NORM: gl.constexpr, PAIR: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    GAIN: gl.constexpr, PDL: gl.constexpr, X_LAYOUT: gl.constexpr, W_LAYOUT: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = ROW_GROUPS * COLUMN_GROUPS
    x_s = gl.allocate_shared_memory(x.dtype, [STAGES * ROW_GROUPS, M, K], X_LAYOUT)
    w_s = gl.allocate_shared_memory(x.dtype, [STAGES * COLUMN_GROUPS, N, K], W_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    fence_async_shared()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    programs = gl.num_programs(0)
    blocks = inner // K
    units = (columns * (2 if PAIR else 1)) // (COLUMN_GROUPS * N) * ROW_TILES * blocks
    begin = first_unit(gl.program_id(0), units, programs, blocks, lead)
    end = first_unit(gl.program_id(0) + 1, units, programs, blocks, lead)
    # fmt: off
    given = (
        bias, squares, gain, residual, out, gained, squares_out, parts, counters, rows, columns, inner, count, eps, scale,
        out_stride,
    )
    ring = (x_s, w_s, full, free, begin, end, blocks, units, programs, lead)
    WAY: gl.constexpr = (
        M, N, GROUPS, COLUMN_GROUPS, ROW_TILES, STAGES, NORM, PAIR, ACT, BIAS, RESIDUAL, GAIN, PDL, STORED,
    )
    if GROUPS == 1:
        gl.warp_specialize([
            (_consume, (0, given, ring, WAY)),
            (_produce, (x, w, x_s, w_s, full, free, begin, end, blocks, columns,
                        M, N, ROW_GROUPS, COLUMN_GROUPS, ROW_TILES, K, STAGES, PAIR, PDL)),
        ], [1], [24])
    elif GROUPS == 2:
        gl.warp_specialize([
            (_consume, (0, given, ring, WAY)),
            (_consume, (1, given, ring, WAY)),
            (_produce, (x, w, x_s, w_s, full, free, begin, end, blocks, columns,
                        M, N, ROW_GROUPS, COLUMN_GROUPS, ROW_TILES, K, STAGES, PAIR, PDL)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consume, (0, given, ring, WAY)),
            (_consume, (1, given, ring, WAY)),
            (_consume, (2, given, ring, WAY)),
            (_produce, (x, w, x_s, w_s, full, free, begin, end, blocks, columns,
                        M, N, ROW_GROUPS, COLUMN_GROUPS, ROW_TILES, K, STAGES, PAIR, PDL)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
    # fmt: on


def cut(tiles: int, blocks: int, programs: int) -> tuple[int, int]:
    """Programs that tiles of so many blocks are cut among, at most `programs`, and the lead of those that finish tiles.

    If nearly all programs get by with the same number a tile, tiles begin where programs do; who leaves a part then has less
    to do, so that its part is there when it is wanted.
    """
    even = programs // tiles * tiles
    if even > tiles and even >= 0.95 * programs and even // tiles <= blocks:
        return even, blocks * tiles // even // LEAD
    return min(programs, tiles * blocks), 0


@cache
def stored_layout(rows: int, outputs: int) -> Any:
    """How results lie on the threads that store them: a thread has eight neighbouring ones, four threads 32, as the sums'
    own layout has them after exchanges within a warp."""
    held = [[0, 1], [0, 2], [0, 4], [8, 0], *([0, 32 << i] for i in range((outputs // 32).bit_length() - 1))]
    held += [[64 << i, 0] for i in range((rows // 64).bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(held, lanes, [[16, 0], [32, 0]], [], [rows, outputs])


def hopper_gemm(
    x: torch.Tensor | Gained,
    w: torch.Tensor,
    out: torch.Tensor,
    work: GemmWorkspace,
    config: GemmConfig,
    **given: Any,
) -> None:
    """`skinny_gemm` with a configuration that has `block_m`."""
    fused = Fused(**given)
    source, rows, columns, inner = sizes(x, w.shape[0], fused)
    c = config
    row_tiles = max(1, -(-c.rows // (c.block_m * c.row_groups)))
    padded = row_tiles * c.row_groups * c.block_m
    assert rows <= padded
    assert unfit(c, columns, inner, pair=fused.pair is not None) is None
    tiles = w.shape[0] // (c.block_n * c.column_groups) * row_tiles
    groups = c.row_groups * c.column_groups
    programs, lead = cut(tiles, inner // BLOCK_K, work.programs)
    assert programs * groups * c.block_m * c.block_n <= work.parts.numel()
    assert tiles * groups <= work.counters.numel()
    kind = gl.bfloat16 if source.dtype == torch.bfloat16 else gl.float16
    x_box, w_box = [c.block_m, BLOCK_K], [c.block_n // (2 if fused.pair else 1), BLOCK_K]
    x_layout = gl.NVMMASharedLayout.get_default_for(x_box, kind)
    w_layout = gl.NVMMASharedLayout.get_default_for(w_box, kind)
    x_given = TensorDescriptor(source, [rows_read(source, padded), inner], [source.stride(0), 1], x_box, x_layout)
    fused.leaves(columns // c.block_n)
    kernel[(programs,)](
        x_given, TensorDescriptor.from_tensor(w, w_box, w_layout), *fused.tensors(x, out, work),
        rows, columns, inner, *fused.numbers(x), out.stride(0), lead,
        M=c.block_m, N=c.block_n, ROW_GROUPS=c.row_groups, COLUMN_GROUPS=c.column_groups, ROW_TILES=row_tiles,
        K=BLOCK_K, STAGES=c.stages, REGISTERS=REGISTERS[groups], X_LAYOUT=x_layout, W_LAYOUT=w_layout,
        STORED=stored_layout(c.block_m, w_box[0]), num_warps=4, **fused.flags(x),
    )  # fmt: skip
