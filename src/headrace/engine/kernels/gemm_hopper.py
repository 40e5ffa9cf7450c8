"""Products of 33 to 512 rows on Hopper cards, with the work around them fused in as in `gemm`.

From 33 rows on a product is bound by how fast weights come to the multiprocessors, and at 256 rows by the tensor cores too;
either way nothing may stop while a tile ends or a kernel does. One program stays on each multiprocessor. One of its warps only
loads: bulk copies of weights and of x into a ring in shared memory as deep as fits. Groups of four warps multiply, each 64 or
128 rows by up to 256 outputs, asynchronously (`wgmma`). Tiles times blocks of the inner dimension are one line of units, cut
into as many equal pieces as there are programs, so that none idles at the end; where a cut goes through a tile, its parts go to
memory in fp32, and the last program to arrive (an atomic counter) adds them up in the order of the inner dimension, so that a
result does not depend on who was last.

Weights depend on nobody: the ring is filled with them before the program waits for the kernel that makes x, and since a
program only starts where one of the kernel before has ended, that kernel's last sums and stores hide behind those loads.

Written in Gluon, Triton's language with explicit layouts. Gluon has no interpreter: formulas are the reference.
"""

from __future__ import annotations

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

from headrace.engine.kernels.activation import ACTIVATIONS, act
from headrace.engine.kernels.gemm import MAX_ROWS, Gained, GemmConfig, GemmWorkspace, unfit

BLOCK_K = 64
"""Inner elements of a block: 128 bytes, the widest swizzle."""
REGISTERS = {1: 240, 2: 240, 3: 160, 4: 112}
"""A thread's, by the groups of warps that multiply."""


@gluon.jit
def first_unit(program, units, programs):
    """Where a program's piece of the line of units begins; it ends where the next one's begins."""
    return program * units // programs


@gluon.jit
def owner(unit, units, programs):
    """The program whose piece holds a unit."""
    return ((unit + 1) * programs - 1) // units


@gluon.jit
def place_of(program, whole_start):
    """Where a program leaves its part of a tile: it has at most one part whose tile began before it, one that it begins."""
    return 2 * program + whole_start


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
def _as_sums(flat, M: gl.constexpr, N: gl.constexpr, SUMS: gl.constexpr):
    """`_in_order` undone."""
    acc = flat.reshape([M // 64, 4, N // 8, 8, 4, 2, 2]).permute([0, 1, 5, 3, 2, 4, 6])
    return gl.convert_layout(acc.reshape([M, N]), SUMS, assert_trivial=True)


@gluon.jit
def _consume(
    WHO: gl.constexpr, given, x_s, w_s, full, free, begin, end, blocks, programs,
    M: gl.constexpr, N: gl.constexpr, GROUPS: gl.constexpr, COLUMN_GROUPS: gl.constexpr, ROW_TILES: gl.constexpr,
    STAGES: gl.constexpr,
    NORM: gl.constexpr, PAIR: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    GAIN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    (
        bias, squares, gain, residual, out, gained, squares_out, parts, counters, rows, columns, inner, count, eps, scale,
        out_stride,
    ) = given  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    SQUARED: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    ROW_GROUPS: gl.constexpr = GROUPS // COLUMN_GROUPS
    ROW_GROUP: gl.constexpr = WHO // COLUMN_GROUPS
    COLUMN_GROUP: gl.constexpr = WHO % COLUMN_GROUPS
    AT_ONCE: gl.constexpr = 2048 // M
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Sums of squares are asked for now and added up at the end.
    squared = gl.zeros([AT_ONCE, M], gl.float32, SQUARED)
    if NORM and ROW_TILES == 1:
        squared = _squares(squares, count, ROW_GROUP * M, rows, M, AT_ONCE, SQUARED)
    n = gl.arange(0, N, gl.SliceLayout(0, SUMS))
    units = (columns * (2 if PAIR else 1)) // (COLUMN_GROUPS * N) * ROW_TILES * blocks
    stage = 0
    phase = 0
    unit = begin
    for _ in range((end - 1) // blocks - begin // blocks + 1):
        tile = unit // blocks
        start = unit - tile * blocks
        steps = gl.minimum(blocks - start, end - unit)
        acc = gl.zeros([M, N], gl.float32, SUMS)
        for i in range(steps):
            mbarrier.wait(full.index(stage), phase)
            acc = warpgroup_mma(
                x_s.index(stage * ROW_GROUPS + ROW_GROUP), w_s.index(stage * COLUMN_GROUPS + COLUMN_GROUP).permute((1, 0)),
                acc, is_async=True,
            )  # fmt: skip
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index(gl.where(stage == 0, STAGES - 1, stage - 1)), pred=i > 0)
            wrap = stage == STAGES - 1
            phase = gl.where(wrap, phase ^ 1, phase)
            stage = gl.where(wrap, 0, stage + 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
        last = True
        if steps < blocks:
            # Only a program's first tile can have begun with another, and its last can end with another.
            flat = _in_order(acc, M, N)
            FLAT: gl.constexpr = flat.type.layout
            in_part = gl.arange(0, M * N // 4, gl.SliceLayout(1, FLAT))[:, None] * 4
            in_part += gl.arange(0, 4, gl.SliceLayout(0, FLAT))[None, :]
            place = place_of(gl.program_id(0), (start == 0).to(gl.int32)) * GROUPS + WHO
            gl.store(parts + place.to(gl.int64) * (M * N) + in_part, flat)
            least = owner(tile * blocks, units, programs)
            most = owner(tile * blocks + blocks - 1, units, programs)
            gl.thread_barrier()
            last = gl.atomic_add(counters + (tile * GROUPS + WHO), 1, sem="acq_rel") == most - least
            if last:
                gl.thread_barrier()
                gl.store(counters + (tile * GROUPS + WHO), 0)
                place = place_of(least, 1) * GROUPS + WHO
                flat = gl.load(parts + place.to(gl.int64) * (M * N) + in_part, cache_modifier=".cg")
                for p in range(least + 1, most + 1):
                    place = place_of(p, 0) * GROUPS + WHO
                    flat += gl.load(parts + place.to(gl.int64) * (M * N) + in_part, cache_modifier=".cg")
                acc = _as_sums(flat, M, N, SUMS)
        if last:
            row = (tile % ROW_TILES * ROW_GROUPS + ROW_GROUP) * M
            column_tile = tile // ROW_TILES * COLUMN_GROUPS + COLUMN_GROUP
            column = column_tile * (N // (2 if PAIR else 1))
            if NORM:
                if ROW_TILES > 1:
                    squared = _squares(squares, count, row, rows, M, AT_ONCE, SQUARED)
                shrink = gl.rsqrt(gl.sum(squared, 0) / inner + eps)
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
            if PAIR:
                gate, up = acc.reshape([M, 2, N // 2]).permute([0, 2, 1]).split()
                m_out = row + gl.arange(0, M, gl.SliceLayout(1, gate.type.layout))
                n_out = column + gl.arange(0, N // 2, gl.SliceLayout(0, gate.type.layout))
                if BIAS:
                    gate += gl.load(bias + n_out).to(gl.float32)[None, :]
                    up += gl.load(bias + columns + n_out).to(gl.float32)[None, :]
                result = act(gate, ACT) * up
            else:
                result = acc
                m_out = row + gl.arange(0, M, gl.SliceLayout(1, SUMS))
                n_out = column + n
                if BIAS:
                    result += gl.load(bias + n_out).to(gl.float32)[None, :]
            inside = (m_out < rows)[:, None] & (n_out >= 0)[None, :]
            target = m_out[:, None] * out_stride + n_out[None, :]
            if RESIDUAL:
                result = result * scale + gl.load(residual + target, inside, 0.0).to(gl.float32)
            rounded = result.to(out.dtype.element_ty)
            gl.store(out + target, rounded, inside)
            if GAIN:
                wide = gl.where(inside, rounded.to(gl.float32), 0.0)
                at = squares_out + column_tile * MAX_ROWS
                gl.store(at + m_out, gl.sum(wide * wide, 1), m_out < rows)
                wide = wide * gl.load(gain + n_out).to(gl.float32)[None, :]
                gl.store(gained + target, wide.to(out.dtype.element_ty), inside)
        unit += steps


@gluon.jit(do_not_specialize=["rows", "eps", "scale", "count"])
def kernel(
    x, w, bias, squares, gain, residual, out, gained, squares_out, parts, counters,
    rows, columns, inner, count, eps, scale, out_stride,
    M: gl.constexpr, N: gl.constexpr, ROW_GROUPS: gl.constexpr, COLUMN_GROUPS: gl.constexpr, ROW_TILES: gl.constexpr,
    K: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    NORM: gl.constexpr, PAIR: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    GAIN: gl.constexpr, PDL: gl.constexpr, X_LAYOUT: gl.constexpr, W_LAYOUT: gl.constexpr,
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
    begin = first_unit(gl.program_id(0), units, programs)
    end = first_unit(gl.program_id(0) + 1, units, programs)
    # fmt: off
    given = (
        bias, squares, gain, residual, out, gained, squares_out, parts, counters, rows, columns, inner, count, eps, scale,
        out_stride,
    )
    if GROUPS == 1:
        gl.warp_specialize([
            (_consume, (0, given, x_s, w_s, full, free, begin, end, blocks, programs,
                        M, N, GROUPS, COLUMN_GROUPS, ROW_TILES, STAGES, NORM, PAIR, ACT, BIAS, RESIDUAL, GAIN, PDL)),
            (_produce, (x, w, x_s, w_s, full, free, begin, end, blocks, columns,
                        M, N, ROW_GROUPS, COLUMN_GROUPS, ROW_TILES, K, STAGES, PAIR, PDL)),
        ], [1], [24])
    elif GROUPS == 2:
        gl.warp_specialize([
            (_consume, (0, given, x_s, w_s, full, free, begin, end, blocks, programs,
                        M, N, GROUPS, COLUMN_GROUPS, ROW_TILES, STAGES, NORM, PAIR, ACT, BIAS, RESIDUAL, GAIN, PDL)),
            (_consume, (1, given, x_s, w_s, full, free, begin, end, blocks, programs,
                        M, N, GROUPS, COLUMN_GROUPS, ROW_TILES, STAGES, NORM, PAIR, ACT, BIAS, RESIDUAL, GAIN, PDL)),
            (_produce, (x, w, x_s, w_s, full, free, begin, end, blocks, columns,
                        M, N, ROW_GROUPS, COLUMN_GROUPS, ROW_TILES, K, STAGES, PAIR, PDL)),
        ], [4, 1], [REGISTERS, 24])
    elif GROUPS == 3:
        gl.warp_specialize([
            (_consume, (0, given, x_s, w_s, full, free, begin, end, blocks, programs,
                        M, N, GROUPS, COLUMN_GROUPS, ROW_TILES, STAGES, NORM, PAIR, ACT, BIAS, RESIDUAL, GAIN, PDL)),
            (_consume, (1, given, x_s, w_s, full, free, begin, end, blocks, programs,
                        M, N, GROUPS, COLUMN_GROUPS, ROW_TILES, STAGES, NORM, PAIR, ACT, BIAS, RESIDUAL, GAIN, PDL)),
            (_consume, (2, given, x_s, w_s, full, free, begin, end, blocks, programs,
                        M, N, GROUPS, COLUMN_GROUPS, ROW_TILES, STAGES, NORM, PAIR, ACT, BIAS, RESIDUAL, GAIN, PDL)),
            (_produce, (x, w, x_s, w_s, full, free, begin, end, blocks, columns,
                        M, N, ROW_GROUPS, COLUMN_GROUPS, ROW_TILES, K, STAGES, PAIR, PDL)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consume, (0, given, x_s, w_s, full, free, begin, end, blocks, programs,
                        M, N, GROUPS, COLUMN_GROUPS, ROW_TILES, STAGES, NORM, PAIR, ACT, BIAS, RESIDUAL, GAIN, PDL)),
            (_consume, (1, given, x_s, w_s, full, free, begin, end, blocks, programs,
                        M, N, GROUPS, COLUMN_GROUPS, ROW_TILES, STAGES, NORM, PAIR, ACT, BIAS, RESIDUAL, GAIN, PDL)),
            (_consume, (2, given, x_s, w_s, full, free, begin, end, blocks, programs,
                        M, N, GROUPS, COLUMN_GROUPS, ROW_TILES, STAGES, NORM, PAIR, ACT, BIAS, RESIDUAL, GAIN, PDL)),
            (_consume, (3, given, x_s, w_s, full, free, begin, end, blocks, programs,
                        M, N, GROUPS, COLUMN_GROUPS, ROW_TILES, STAGES, NORM, PAIR, ACT, BIAS, RESIDUAL, GAIN, PDL)),
            (_produce, (x, w, x_s, w_s, full, free, begin, end, blocks, columns,
                        M, N, ROW_GROUPS, COLUMN_GROUPS, ROW_TILES, K, STAGES, PAIR, PDL)),
        ], [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24])
    # fmt: on


def hopper_gemm(
    x: torch.Tensor | Gained,
    w: torch.Tensor,
    out: torch.Tensor,
    work: GemmWorkspace,
    config: GemmConfig,
    *,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    pair: str | None = None,
    gain: torch.Tensor | None = None,
    gained: Gained | None = None,
    pdl: bool = False,
) -> None:
    """`skinny_gemm` with a configuration that has `block_m`."""
    normed = isinstance(x, Gained)
    source = x.values if isinstance(x, Gained) else x
    rows, inner = source.shape
    columns = w.shape[0] // (2 if pair else 1)
    c = config
    row_tiles = max(1, -(-c.rows // (c.block_m * c.row_groups)))
    padded = row_tiles * c.row_groups * c.block_m
    assert rows <= padded
    assert unfit(c, columns, inner, pair=pair is not None) is None
    tiles = w.shape[0] // (c.block_n * c.column_groups) * row_tiles
    groups = c.row_groups * c.column_groups
    programs = min(work.programs, tiles * (inner // BLOCK_K))
    assert 2 * programs * groups * c.block_m * c.block_n <= work.parts.numel()
    assert tiles * groups <= work.counters.numel()
    kind = gl.bfloat16 if source.dtype == torch.bfloat16 else gl.float16
    x_box, w_box = [c.block_m, BLOCK_K], [c.block_n // (2 if pair else 1), BLOCK_K]
    x_layout = gl.NVMMASharedLayout.get_default_for(x_box, kind)
    w_layout = gl.NVMMASharedLayout.get_default_for(w_box, kind)
    # Rows past the tensor's end cost the copy engine time. Where the memory goes on they are read: they only reach rows that
    # are not stored.
    there = (source.untyped_storage().nbytes() // source.element_size() - source.storage_offset()) // source.stride(0)
    x_given = TensorDescriptor(
        source, [padded if there >= padded else rows, inner], [source.stride(0), 1], x_box, x_layout
    )
    if gained is not None:
        gained.count = columns // c.block_n
        assert gained.count * MAX_ROWS.value <= gained.squares.numel()
    some = work.parts
    kernel[(programs,)](
        x_given, TensorDescriptor.from_tensor(w, w_box, w_layout), some if bias is None else bias,
        x.squares if normed else some, some if gain is None else gain, some if residual is None else residual,
        out, out if gained is None else gained.values, some if gained is None else gained.squares, work.parts, work.counters,
        rows, columns, inner, x.count if normed else 0, eps, scale, out.stride(0),
        M=c.block_m, N=c.block_n, ROW_GROUPS=c.row_groups, COLUMN_GROUPS=c.column_groups, ROW_TILES=row_tiles,
        K=BLOCK_K, STAGES=c.stages, REGISTERS=REGISTERS[groups], NORM=normed, PAIR=pair is not None,
        ACT=ACTIVATIONS[pair or "silu"], BIAS=bias is not None, RESIDUAL=residual is not None, GAIN=gained is not None,
        PDL=pdl, X_LAYOUT=x_layout, W_LAYOUT=w_layout, num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
