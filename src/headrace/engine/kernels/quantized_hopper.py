"""Products of 17 to 256 rows with quantized weights on Hopper cards: codes are unpacked into the tensor cores' registers.

The line of units, its cuts, the ring, the parts and who adds them are those of `headrace.engine.kernels.gemm_hopper`. Here the
product is turned round, out' = W x': the asynchronous tensor-core instruction takes its left operand from registers, so the
weights are on the left and never written back to memory of any kind; a block of x, all rows of it, is the right one in shared memory. So
each code is unpacked once for all rows, with the other group of warps multiplying meanwhile. One warp loads codes and x by bulk
copies. A block is of 128 inputs, two operands of 64.

A thread's part of the left operand is two neighbouring inputs at a time, which of 4-bit codes are 16 bits of shared memory, with
two inputs of the chunk's second half above them. Scales of groups are multiplied in bf16 as a large and a small part, which gives
what rounding the exact product of code and scale to bf16 gives: the weights are those of `dequantize`, to the bit where a scale is
of fp16. Gate and up are eight outputs each of a tile's sixteen neighbouring rows, so that a thread has both.
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
from headrace.engine.kernels.gemm import MAX_ROWS, Fused, Gained, GemmConfig, GemmWorkspace, rows_read, sizes
from headrace.engine.kernels.gemm_hopper import (
    REGISTERS,
    _as_sums,
    _in_order,
    _in_part,
    _squares,
    cut,
    first_unit,
    owner,
)
from headrace.engine.kernels.quantized import (
    BY_EXPONENT,
    BY_NESTED,
    DIRECT_INPUTS,
    NESTED,
    QuantMatrix,
    not_specialized,
    part_of,
)
from headrace.engine.kernels.unpack import (
    INT4,
    INT8,
    MXFP4,
    int4_pairs,
    int8_pairs,
    mxfp4_pairs,
    nf4_pairs,
    scaled_pairs,
    shifted_pairs,
    spread_bytes,
)

HALF_K = gl.constexpr(64)


@gluon.jit
def _produce(
    x, codes, x_s, w_s, full, free, begin, end, blocks, row_tiles, columns, rows_total,
    M: gl.constexpr, N: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr, WORDS: gl.constexpr,
    ROWS_OF_CODES: gl.constexpr, PAIR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = GROUPS * N * PIECES * WORDS * (codes.dtype.primitive_bitwidth // 8) + M * 256
    count = end - begin
    first = gl.minimum(count, STAGES)
    # fmt: off
    for i in range(first):
        mbarrier.expect(full.index(i), BYTES)
        _codes(codes, w_s, i, full.index(i), begin + i, blocks, row_tiles, columns, rows_total, N, GROUPS, PIECES, WORDS,
               ROWS_OF_CODES, PAIR)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in range(first):
        _rows(x, x_s, i, full.index(i), begin + i, blocks, row_tiles, M)
    stage = 0
    phase = 0
    for i in range(STAGES, count):
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(full.index(stage), BYTES)
        _codes(codes, w_s, stage, full.index(stage), begin + i, blocks, row_tiles, columns, rows_total, N, GROUPS, PIECES,
               WORDS, ROWS_OF_CODES, PAIR)
        _rows(x, x_s, stage, full.index(stage), begin + i, blocks, row_tiles, M)
        wrap = stage == STAGES - 1
        phase = gl.where(wrap, phase ^ 1, phase)
        stage = gl.where(wrap, 0, stage + 1)
    # fmt: on


@gluon.jit
def _codes(
    codes, w_s, stage, barrier, unit, blocks, row_tiles, columns, rows_total,
    N: gl.constexpr, GROUPS: gl.constexpr, PIECES: gl.constexpr, WORDS: gl.constexpr, ROWS_OF_CODES: gl.constexpr,
    PAIR: gl.constexpr,
):  # fmt: skip
    """Ask for a unit's codes; of pairs each group of warps gets as many rows of the second half as of the first."""
    tile = unit // blocks
    block = unit - tile * blocks
    tile = tile // row_tiles
    for c in gl.static_range(GROUPS):
        for p in gl.static_range(PIECES):
            target = w_s.index((stage * GROUPS + c) * PIECES + p)
            if ROWS_OF_CODES:
                base, word = 0, (block * PIECES + p) * WORDS
            else:
                base, word = (block * PIECES + p) * rows_total, 0
            if PAIR:
                row = base + (tile * GROUPS + c) * (N // 2)
                tma.async_copy_global_to_shared(codes, [row, word], barrier, target.slice(0, N // 2))
                tma.async_copy_global_to_shared(codes, [columns + row, word], barrier, target.slice(N // 2, N // 2))
            else:
                row = base + (tile * GROUPS + c) * N
                tma.async_copy_global_to_shared(codes, [row, word], barrier, target)


@gluon.jit
def _rows(x, x_s, stage, barrier, unit, blocks, row_tiles, M: gl.constexpr):
    """Ask for a unit's part of x."""
    tile = unit // blocks
    k = (unit - tile * blocks) * 128
    row = tile % row_tiles * M
    tma.async_copy_global_to_shared(x, [row, k], barrier, x_s.index(stage * 2))
    tma.async_copy_global_to_shared(x, [row, k + HALF_K], barrier, x_s.index(stage * 2 + 1))


@gluon.jit
def _asked(
    scales, zeros, nested, row, block, groups, rows_total,
    KIND: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr, ASYM: gl.constexpr,
):  # fmt: skip
    """Ask for the scales of a block's groups, and for what goes with them: a tuple of three for each group."""
    found = ()
    if GROUP > 0:
        PER: gl.constexpr = 128 // GROUP
        for g in gl.static_range(PER):
            group = block * PER + g
            one = gl.load(scales + (group * rows_total + row))
            two, three = one, one
            if SCALE == BY_NESTED:
                two = gl.load(nested + (row * groups + group) // NESTED)
            if ASYM:
                three = gl.load(zeros + (group * rows_total + row) // (2 if KIND == INT4 else 1))
            found += (one, two, three)
    return found


@gluon.jit
def _twice(value):
    """Words of a bf16 value twice."""
    bits = value.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (bits << 16)


@gluon.jit
def _factors(
    found, G: gl.constexpr, row_dims: gl.constexpr, offset, tables, SCALE: gl.constexpr,
):  # fmt: skip
    """What a group's values are multiplied by: of a scale the large and the small part, of a power of two it and nothing."""
    code = found[3 * G]
    if SCALE == BY_EXPONENT:
        bits = code.to(gl.int32)
        large = bits << 7 | bits << 23
        small = large
    else:
        if SCALE == BY_NESTED:
            value = gl.load(tables + code.to(gl.int32)) * found[3 * G + 1] + offset
        else:
            value = code.to(gl.float32)
        rounded = value.to(gl.bfloat16)
        large = _twice(rounded)
        small = _twice((value - rounded.to(gl.float32)).to(gl.bfloat16))
    large = gl.expand_dims(large, 1)
    small = gl.expand_dims(small, 1)
    if row_dims == 3:
        large = gl.expand_dims(large, 2)
        small = gl.expand_dims(small, 2)
    return large, small


@gluon.jit
def _read(w_s, at, STEP: gl.constexpr, N: gl.constexpr, KIND: gl.constexpr, PIECES: gl.constexpr, HELD: gl.constexpr):
    """The words that a thread multiplies in a step of a block, and in the steps up to the next that reads any."""
    if N == 64:
        return w_s.index(at * PIECES + (STEP if PIECES == 2 else 0)).load(HELD)
    elif KIND == MXFP4:
        return w_s.index(at * 2 + STEP // 2).load(HELD)
    elif KIND == INT8:
        return w_s.index(at * 2 + STEP // 2).slice(STEP % 2 * 16, 16, dim=1).load(HELD)
    else:
        return w_s.index(at).slice(STEP // 2 * 16, 16, dim=1).load(HELD)


@gluon.jit
def _inputs(x_s, stage, STEP: gl.constexpr, N: gl.constexpr, KIND: gl.constexpr):
    """x of a step, [inputs, M]."""
    if N == 64:
        return x_s.index(stage * 2 + STEP).permute((1, 0))
    elif KIND == MXFP4 or KIND == INT8:  # noqa: SIM109
        return x_s.index(stage * 2 + STEP // 2).slice(STEP % 2 * 32, 32, dim=1).permute((1, 0))
    else:
        return x_s.index(stage * 2 + STEP % 2).slice(STEP // 2 * 32, 32, dim=1).permute((1, 0))


@gluon.jit
def _operand(
    words, found, row, offset, tables, turns,
    STEP: gl.constexpr, N: gl.constexpr, KIND: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr, ASYM: gl.constexpr,
    PAIR: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """bf16 [N, 4096 / N]: the weights of a step as the left operand. In a block of 128 inputs are two steps with tiles of 64
    outputs, four with those of 128: of 4-bit codes the two that the same words have come one after the other."""
    K: gl.constexpr = 4096 // N
    # Which half of words or pieces of 64 inputs a step is of, and the group of its scale.
    HALF: gl.constexpr = STEP if N == 64 else (STEP // 2 if KIND == INT8 else STEP % 2)
    G: gl.constexpr = 0 if GROUP == 0 else HALF * 64 // GROUP
    if KIND == MXFP4:
        first, second, sign = turns
        word = gl.expand_dims(words, 2)
        word = gl.broadcast(word, first + word * 0)[0]
        if N == 64:
            by0, _ = _factors(found, 2 * STEP, 3, offset, tables, SCALE)
            by1, _ = _factors(found, 2 * STEP + 1, 3, offset, tables, SCALE)
            by0, by1 = gl.broadcast(by0, word)[0], gl.broadcast(by1, word)[0]
            pairs = gl.join(
                mxfp4_pairs(word, first, first, by0, 0).reshape([N, 16]),
                mxfp4_pairs(word, second, sign, by1, 1).reshape([N, 16]),
            )
            pairs = pairs.permute([0, 2, 1]).reshape([N, 32])
        else:
            by0, _ = _factors(found, STEP, 3, offset, tables, SCALE)
            by0 = gl.broadcast(by0, word)[0]
            if HALF == 0:
                pairs = mxfp4_pairs(word, first, first, by0, 0).reshape([N, 16])
            else:
                pairs = mxfp4_pairs(word, second, sign, by0, 1).reshape([N, 16])
    else:
        if KIND == INT4:
            taken = spread_bytes(words.to(gl.uint16, bitcast=True).to(gl.int32))
            if ASYM:
                zero = found[3 * G + 2].to(gl.int32)
                zero = gl.expand_dims(_twice((-128 - (zero >> row % 2 * 4 & 15)).to(gl.float32).to(gl.bfloat16)), 1)
                pairs = shifted_pairs(taken, gl.broadcast(zero, taken)[0], HALF)
            else:
                pairs = int4_pairs(taken, HALF)
        elif KIND == INT8:
            pairs = int8_pairs(spread_bytes(words.to(gl.uint16, bitcast=True).to(gl.int32)))
        else:
            pairs = nf4_pairs(words, HALF)
        if GROUP > 0:
            large, small = _factors(found, G, 2, offset, tables, SCALE)
            large, small = gl.broadcast(large, pairs)[0], gl.broadcast(small, pairs)[0]
            pairs = scaled_pairs(pairs, large, small)
    low = pairs.to(gl.int16).to(gl.bfloat16, bitcast=True)
    values = gl.join(low, (pairs >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)).reshape([N, K])
    if PAIR:
        values = values.reshape([2, N // 16, 8, K]).permute([1, 0, 2, 3]).reshape([N, K])
    return gl.convert_layout(values, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def _pieces(x, COUNT: gl.constexpr):
    """x [outputs, rows] cut into so many pieces of neighbouring rows."""
    if COUNT == 1:
        return (x,)
    else:
        low, high = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()
        return _pieces(low, COUNT // 2) + _pieces(high, COUNT // 2)


@gluon.jit
def _places(p: gl.constexpr, tile, row0, row_tiles, rows, out_stride, WHO: gl.constexpr, WAY: gl.constexpr):
    """Of the p-th piece of what a group ends: its rows, its outputs, which of them are stored, and where."""
    N_OUT: gl.constexpr = WAY[1] // (2 if WAY[5] else 1)
    STORED: gl.constexpr = WAY[11]
    PIECE: gl.constexpr = WAY[19] if WAY[19] < 64 else 64
    m = row0 + p * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, STORED))
    n = (tile // row_tiles * WAY[2] + WHO) * N_OUT + gl.arange(0, N_OUT, gl.SliceLayout(1, STORED))
    return m, n, (m < rows)[None, :] & (n >= 0)[:, None], m[None, :] * out_stride + n[:, None]


@gluon.jit
def _old(residual, tile, row0, row_tiles, rows, out_stride, WHO: gl.constexpr, WAY: gl.constexpr):
    """Ask for what is added at a tile's end, if there are registers for it."""
    found = ()
    if WAY[8] and WAY[19] * WAY[1] <= 8192:
        for p in gl.static_range(WAY[19] // 64 if WAY[19] > 64 else 1):
            _, _, inside, target = _places(p, tile, row0, row_tiles, rows, out_stride, WHO, WAY)
            found += (gl.load(residual + target, inside, 0.0),)
    return found


@gluon.jit
def _finish(acc, old, tile, row0, row_tiles, given, shrink_s, WHO: gl.constexpr, WAY: gl.constexpr):
    """What follows the sums [N, ENDED] of all inputs."""
    N: gl.constexpr = WAY[1]
    NORM: gl.constexpr = WAY[4]
    PAIR: gl.constexpr = WAY[5]
    ACT: gl.constexpr = WAY[6]
    BIAS: gl.constexpr = WAY[7]
    RESIDUAL: gl.constexpr = WAY[8]
    GAIN: gl.constexpr = WAY[9]
    STORED: gl.constexpr = WAY[11]
    GROUP: gl.constexpr = WAY[15]
    BETWEEN: gl.constexpr = WAY[18]
    ENDED: gl.constexpr = WAY[19]
    scales, bias, gain, residual, out, gained, squares_out, rows, columns, scale, out_stride = given
    SUMS: gl.constexpr = acc.type.layout
    N_OUT: gl.constexpr = N // (2 if PAIR else 1)
    COUNT: gl.constexpr = ENDED // 64 if ENDED > 64 else 1
    column_tile = tile // row_tiles * WAY[2] + WHO
    column = column_tile * N_OUT
    if GROUP == 0 or BIAS:
        # A tile's rows are eight of the first half and eight of the second by turns.
        n_in = gl.arange(0, N, gl.SliceLayout(1, SUMS))
        if PAIR:
            n_in = n_in // 16 * 8 + n_in % 8 + n_in // 8 % 2 * columns
        n_in = column + n_in
    if GROUP == 0:
        acc *= gl.load(scales + n_in)[:, None]
    if NORM:
        acc *= shrink_s.index(WHO * (MAX_ROWS // ENDED) + row0 // ENDED).load(gl.SliceLayout(0, SUMS))[None, :]
    if BIAS:
        acc += gl.load(bias + n_in).to(gl.float32)[:, None]
    if PAIR:
        gate, up = acc.reshape([N // 16, 2, 8, ENDED]).permute([0, 2, 3, 1]).split()
        acc = (act(gate, ACT) * up).reshape([N_OUT, ENDED])
    # Piece by piece, since there are no registers for more of what is added and stored.
    pieces = _pieces(acc, COUNT)
    for p in gl.static_range(COUNT):
        piece = pieces[p]
        for b in gl.static_range(len(BETWEEN)):
            piece = gl.convert_layout(piece, BETWEEN[b])
        piece = gl.convert_layout(piece, STORED)
        m, n, inside, target = _places(p, tile, row0, row_tiles, rows, out_stride, WHO, WAY)
        if RESIDUAL:
            if len(old) > 0:
                piece = piece * scale + old[p].to(gl.float32)
            else:
                piece = piece * scale + gl.load(residual + target, inside, 0.0).to(gl.float32)
        rounded = piece.to(out.dtype.element_ty)
        gl.store(out + target, rounded, inside)
        if GAIN:
            wide = gl.where(inside, rounded.to(gl.float32), 0.0)
            gl.store(squares_out + column_tile * MAX_ROWS + m, gl.sum(wide * wide, 0), m < rows)
            wide = wide * gl.load(gain + n).to(gl.float32)[:, None]
            gl.store(gained + target, wide.to(out.dtype.element_ty), inside)


@gluon.jit
def _consume(WHO: gl.constexpr, given, ring, WAY: gl.constexpr):
    """The part of a group of four warps: unpack and multiply what the ring brings, and what follows a whole tile."""
    M: gl.constexpr = WAY[0]
    N: gl.constexpr = WAY[1]
    GROUPS: gl.constexpr = WAY[2]
    STAGES: gl.constexpr = WAY[3]
    NORM: gl.constexpr = WAY[4]
    PAIR: gl.constexpr = WAY[5]
    PDL: gl.constexpr = WAY[10]
    HELD: gl.constexpr = WAY[12]
    KIND: gl.constexpr = WAY[13]
    SCALE: gl.constexpr = WAY[14]
    GROUP: gl.constexpr = WAY[15]
    ASYM: gl.constexpr = WAY[16]
    PIECES: gl.constexpr = WAY[17]
    ENDED: gl.constexpr = WAY[19]
    SCATTER: gl.constexpr = M // ENDED
    x_s, w_s, shrink_s, full, free, begin, end, blocks, row_tiles, units, programs, lead = ring
    (
        ends, scales, zeros, nested, offsets, tables, squares, parts, counters, inner, rows_total, count, eps, part1, part2,
    ) = given  # fmt: skip
    _, _, _, residual, _, _, _, rows, columns, _, out_stride = ends
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    SQUARED: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    STEPS: gl.constexpr = 2 if N == 64 else 4
    # Every so many steps words are read.
    READS: gl.constexpr = 1 if KIND == INT8 else STEPS // PIECES if KIND == MXFP4 else STEPS // 2 if N == 128 else 2
    N_OUT: gl.constexpr = N // (2 if PAIR else 1)
    ENDED_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ENDED, 16])
    groups = 1
    if GROUP > 0:
        groups = inner // GROUP
    in_tile = gl.arange(0, N, gl.SliceLayout(1, HELD))
    if PAIR:
        in_tile = gl.where(in_tile < N_OUT, in_tile, in_tile + (columns - N_OUT))
    turns = ()
    if KIND == MXFP4:
        odd = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, HELD.parent)))
        odd = gl.expand_dims(gl.expand_dims(odd, 0), 0)
        turns = (odd * 3, 6 + odd * 23, 1 + odd)
    # The first operand, its scales and words are made ahead: here, and then while the second half of a block is multiplied.
    tile = begin // blocks
    row = in_tile + (tile // row_tiles * GROUPS + WHO) * N_OUT
    offset = 0.0
    if SCALE == BY_NESTED:
        offset = gl.load(offsets + part_of(row, part1, part2))
    found = _asked(
        scales, zeros, nested, row, begin - tile * blocks, groups, rows_total, KIND, SCALE, GROUP, ASYM
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    if NORM:
        for t in range(row_tiles * SCATTER):
            total = gl.sum(_squares(squares, count, t * ENDED, rows, ENDED, 2048 // ENDED, SQUARED), 0)
            shrink_s.index(WHO * (MAX_ROWS // ENDED) + t).store(gl.rsqrt(total / inner + eps))
        gl.thread_barrier()
    mbarrier.wait(full.index(0), 0)
    words = _read(w_s, WHO, 0, N, KIND, PIECES, HELD)
    left = _operand(words, found, row, offset, tables, turns, 0, N, KIND, SCALE, GROUP, ASYM, PAIR, SUMS)
    stage = 0
    phase = 0
    unit = begin
    for _ in range((end - 1) // blocks - begin // blocks + 1):
        tile = unit // blocks
        start = unit - tile * blocks
        steps = gl.minimum(blocks - start, end - unit)
        acc = gl.zeros([N, M], gl.float32, SUMS)
        for i in range(steps):
            for q in gl.static_range(STEPS):
                acc = warpgroup_mma(left, _inputs(x_s, stage, q, N, KIND), acc, is_async=True)
                # While it runs, the next operand is made in the registers of the one before.
                if q > 0:
                    acc, before = warpgroup_mma_wait(1, deps=[acc, before])  # noqa: F821
                before = left
                if q == 0:
                    # The next block's scales are under way while this one is multiplied.
                    more = unit + i + 1 < end
                    whole = start + i + 1 == blocks
                    next_tile = gl.where(whole & more, tile + 1, tile)
                    next_row = in_tile + (next_tile // row_tiles * GROUPS + WHO) * N_OUT
                    next_offset = offset
                    if SCALE == BY_NESTED:
                        next_offset = gl.load(offsets + part_of(next_row, part1, part2))
                    coming = _asked(
                        scales, zeros, nested, next_row, gl.where(whole, 0, start + i + 1), groups, rows_total,
                        KIND, SCALE, GROUP, ASYM,
                    )  # fmt: skip
                if q < STEPS - 1:
                    if (q + 1) % READS == 0:
                        words = _read(w_s, stage * GROUPS + WHO, q + 1, N, KIND, PIECES, HELD)
                    left = _operand(
                        words, found, row, offset, tables, turns, q + 1, N, KIND, SCALE, GROUP, ASYM, PAIR, SUMS
                    )  # fmt: skip
                else:
                    wrap = stage == STAGES - 1
                    phase = gl.where(wrap, phase ^ 1, phase)
                    stage = gl.where(wrap, 0, stage + 1)
                    row, offset, found = next_row, next_offset, coming
                    mbarrier.wait(full.index(stage), phase, pred=more)
                    words = _read(w_s, stage * GROUPS + WHO, 0, N, KIND, PIECES, HELD)
                    left = _operand(
                        words, found, row, offset, tables, turns, 0, N, KIND, SCALE, GROUP, ASYM, PAIR, SUMS
                    )  # fmt: skip
                    # Operands that are in use while a loop turns would be waited for one by one.
                    acc, before = warpgroup_mma_wait(0, deps=[acc, before])
                    mbarrier.arrive(free.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
        program = gl.program_id(0)
        counter = counters + (tile * GROUPS + WHO)
        row0 = tile % row_tiles * M
        if SCATTER > 1:
            # As many programs have parts of the tile as it has parts of rows; each leaves all and finishes those of its own.
            mine = program % SCATTER
            row0 += mine * ENDED
            place = (tile * GROUPS + WHO).to(gl.int64) * (N * M * SCATTER)
            pieces = _pieces(acc, SCATTER)
            for q in gl.static_range(SCATTER):
                flat = _in_order(pieces[q], N, ENDED)
                at = place + (q * SCATTER + mine) * (N * ENDED)
                gl.store(parts + (at + _in_part(flat, N, ENDED)), flat)
            gl.thread_barrier()
            gl.atomic_add(counter, 1, sem="release")
            old = _old(residual, tile, row0, row_tiles, rows, out_stride, WHO, WAY)
            while gl.atomic_add(counter, 0, sem="acquire") < SCATTER:
                pass
            gl.thread_barrier()
            in_part = _in_part(flat, N, ENDED)
            at = place + mine * (SCATTER * N * ENDED)
            got = ()
            for q in gl.static_range(SCATTER):
                got += (gl.load(parts + (at + q * (N * ENDED) + in_part), cache_modifier=".cg"),)
            flat = got[0]
            for q in gl.static_range(1, SCATTER):
                flat += got[q]
            # Who leaves last puts the counter back.
            gl.thread_barrier()
            if gl.atomic_add(counter, 1, sem="relaxed") == 2 * SCATTER - 1:
                gl.store(counter, 0)
            ended = _as_sums(flat, N, ENDED, ENDED_SUMS)
            _finish(ended, old, tile, row0, row_tiles, ends, shrink_s, WHO, WAY)
        elif start > 0:
            # The tile began with another program, which finishes it.
            flat = _in_order(acc, N, M)
            gl.store(parts + ((program * GROUPS + WHO).to(gl.int64) * (M * N) + _in_part(flat, N, M)), flat)
            gl.thread_barrier()
            gl.atomic_add(counter, 1, sem="release")
        else:
            old = _old(residual, tile, row0, row_tiles, rows, out_stride, WHO, WAY)
            if steps < blocks:
                flat = _in_order(acc, N, M)
                in_part = _in_part(flat, N, M)
                last = owner(tile * blocks + blocks - 1, units, programs, blocks, lead)
                # All programs are on the card, and parts that others leave wait for nobody.
                while gl.atomic_add(counter, 0, sem="acquire") < last - program:
                    pass
                gl.thread_barrier()
                gl.store(counter, 0)
                for p in range(program + 1, last + 1):
                    at = (p * GROUPS + WHO).to(gl.int64) * (M * N) + in_part
                    flat += gl.load(parts + at, cache_modifier=".cg")
                acc = _as_sums(flat, N, M, SUMS)
            _finish(acc, old, tile, row0, row_tiles, ends, shrink_s, WHO, WAY)
        unit += steps


@gluon.jit(do_not_specialize=["rows", "eps", "scale", "count", "lead", "row_tiles", "part1", "part2"])
def kernel(
    x, codes, scales, zeros, nested, offsets, tables, bias, squares, gain, residual, out, gained, squares_out, parts,
    counters, rows, columns, inner, rows_total, count, eps, scale, out_stride, lead, row_tiles, part1, part2,
    M: gl.constexpr, N: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    KIND: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr, ASYM: gl.constexpr,
    NORM: gl.constexpr, PAIR: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    GAIN: gl.constexpr, PDL: gl.constexpr, X_LAYOUT: gl.constexpr, W_LAYOUT: gl.constexpr, STORED: gl.constexpr,
    BETWEEN: gl.constexpr, HELD: gl.constexpr, ENDED: gl.constexpr,
):  # fmt: skip
    PIECES: gl.constexpr = 2 if KIND == MXFP4 or KIND == INT8 else 1  # noqa: SIM109
    WORDS: gl.constexpr = 8 if KIND == MXFP4 else 32
    x_s = gl.allocate_shared_memory(x.dtype, [STAGES * 2, M, 64], X_LAYOUT)
    w_s = gl.allocate_shared_memory(codes.dtype, [STAGES * GROUPS * PIECES, N, WORDS], W_LAYOUT)
    shrink_s = gl.allocate_shared_memory(
        gl.float32, [GROUPS * MAX_ROWS // ENDED if NORM else 1, ENDED], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    fence_async_shared()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    programs = gl.num_programs(0)
    blocks = inner // 128
    units = rows_total // (GROUPS * N) * row_tiles * blocks
    begin = first_unit(gl.program_id(0), units, programs, blocks, lead)
    end = first_unit(gl.program_id(0) + 1, units, programs, blocks, lead)
    # fmt: off
    ends = (scales, bias, gain, residual, out, gained, squares_out, rows, columns, scale, out_stride)
    given = (
        ends, scales, zeros, nested, offsets, tables, squares, parts, counters, inner, rows_total, count, eps, part1, part2,
    )
    ring = (x_s, w_s, shrink_s, full, free, begin, end, blocks, row_tiles, units, programs, lead)
    WAY: gl.constexpr = (
        M, N, GROUPS, STAGES, NORM, PAIR, ACT, BIAS, RESIDUAL, GAIN, PDL, STORED, HELD, KIND, SCALE, GROUP, ASYM, PIECES,
        BETWEEN, ENDED,
    )
    if GROUPS == 1:
        gl.warp_specialize([
            (_consume, (0, given, ring, WAY)),
            (_produce, (x, codes, x_s, w_s, full, free, begin, end, blocks, row_tiles, columns, rows_total,
                        M, N, GROUPS, STAGES, PIECES, WORDS, KIND == INT8, PAIR, PDL)),
        ], [1], [24])
    elif GROUPS == 2:
        gl.warp_specialize([
            (_consume, (0, given, ring, WAY)),
            (_consume, (1, given, ring, WAY)),
            (_produce, (x, codes, x_s, w_s, full, free, begin, end, blocks, row_tiles, columns, rows_total,
                        M, N, GROUPS, STAGES, PIECES, WORDS, KIND == INT8, PAIR, PDL)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consume, (0, given, ring, WAY)),
            (_consume, (1, given, ring, WAY)),
            (_consume, (2, given, ring, WAY)),
            (_produce, (x, codes, x_s, w_s, full, free, begin, end, blocks, row_tiles, columns, rows_total,
                        M, N, GROUPS, STAGES, PIECES, WORDS, KIND == INT8, PAIR, PDL)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
    # fmt: on


@cache
def held_layout(outputs: int, kind: int, pair: bool) -> Any:
    """How the words of a tile lie on threads: as the pairs of inputs of the left operand do. `pair`: a tile's first half of
    rows are one matrix's, and eight of either follow each other in the operand."""
    rows = [1, 2, 4, outputs // 2, 8, 16, 32] if pair else [1, 2, 4, 8, 16, 32, 64]
    more = [rows[6]] if outputs == 128 else []
    layout = gl.DistributedLinearLayout
    if kind == MXFP4.value:
        held = [[rows[3], 0, 0], [0, 2, 0], [0, 4, 0], *([r, 0, 0] for r in more)]
        lanes = [[0, 0, 1], [0, 1, 0], *([r, 0, 0] for r in rows[:3])]
        return gl.SliceLayout(2, layout(held, lanes, [[r, 0, 0] for r in rows[4:6]], [], [outputs, 8, 2]))
    held = [[rows[3], 0], [0, 4], [0, 8], *([r, 0] for r in more)] + ([[0, 16]] if outputs == 64 else [])
    lanes = [[0, 1], [0, 2], *([r, 0] for r in rows[:3])]
    return layout(held, lanes, [[r, 0] for r in rows[4:6]], [], [outputs, 2048 // outputs])


@cache
def stored_layouts(rows: int, outputs: int, pair: bool) -> tuple[tuple[Any, ...], Any]:
    """How results [outputs, rows] lie on the threads that store them: a thread has eight neighbouring outputs, or twice as
    many, of one row. Before it, the way there from the sums' own layout."""
    shape = [outputs // (2 if pair else 1), rows]
    warps = [[8, 0], [16, 0]] if pair else [[16, 0], [32, 0]]
    more = ([] if pair else [[8, 0]]) + ([[shape[0] // 2, 0]] if outputs == 128 else [])
    layout = gl.DistributedLinearLayout
    m = [[0, 1 << i] for i in range(rows.bit_length() - 1)]
    one, two, four = [1, 0], [2, 0], [4, 0]
    lanes = [m[1], m[2]]
    # Only an exchange of one bit of the register's number with one of the lane's stays within warps.
    if rows == 16:
        first = layout([one, *more, m[3]], [*lanes, m[0], two, four], warps, [], shape)
        return (first,), layout([one, two, *more], [*lanes, m[0], m[3], four], warps, [], shape)
    between = (
        layout([one, *more, *m[3:]], [*lanes, m[0], two, four], warps, [], shape),
        layout([one, *more, two, *m[4:]], [*lanes, m[0], m[3], four], warps, [], shape),
        layout([one, *more, two, four, *m[5:]], [*lanes, m[0], m[3], m[4]], warps, [], shape),
    )
    return between, layout([one, two, four, *more, *m[5:]], [*lanes, m[0], m[3], m[4]], warps, [], shape)


def hopper_quantized_gemm(
    x: torch.Tensor | Gained,
    w: QuantMatrix,
    out: torch.Tensor,
    work: GemmWorkspace,
    config: GemmConfig,
    **given: Any,
) -> None:
    """`quantized_gemm` with a configuration that has `block_m`: all rows at once; `block_n` are a group's outputs, of both
    matrices of a pair together, and `column_groups` its groups of four warps."""
    fused = Fused(**given)
    source, rows, columns, inner = sizes(x, w.shape[0], fused)
    c = config
    row_tiles = -(-rows // c.block_m)
    assert rows <= MAX_ROWS.value or not (isinstance(x, Gained) or fused.gained is not None)
    assert (why := not_specialized(w, c)) is None, why
    tiles = w.shape[0] // (c.block_n * c.column_groups) * row_tiles
    programs, lead = cut(tiles, inner // DIRECT_INPUTS, work.programs)
    # Where all programs have the same part of one tile each, they end it together; of products alone there is one kernel.
    scatter = programs // tiles if fused.gained is not None and programs % tiles == 0 else 1
    if scatter not in (2, 4, 8) or inner // DIRECT_INPUTS % scatter or c.block_m // scatter < 16:
        scatter = 1
    ended = c.block_m // scatter
    lead = 0 if scatter > 1 else lead
    assert programs * c.column_groups * c.block_m * c.block_n <= work.parts.numel()
    assert tiles * c.column_groups <= work.counters.numel()
    words = _words(w)
    piece = 8 if w.kind == MXFP4.value else 32
    kind = gl.int32 if w.kind == MXFP4.value else gl.int16
    n_out = c.block_n // (2 if fused.pair else 1)
    x_box, w_box = [c.block_m, 64], [n_out, piece]
    x_layout = gl.NVMMASharedLayout.get_default_for(x_box, gl.bfloat16)
    w_layout = gl.NVMMASharedLayout.get_default_for(w_box, kind)
    x_given = TensorDescriptor(
        source, [rows_read(source, row_tiles * c.block_m), inner], [source.stride(0), 1], x_box, x_layout
    )
    between, stored = stored_layouts(min(ended, 64), c.block_n, fused.pair is not None)
    fused.leaves(columns // n_out)
    kernel[(programs,)](
        x_given, TensorDescriptor.from_tensor(words, w_box, w_layout), *w.given(work.parts), *fused.tensors(x, out, work),
        rows, columns, inner, w.shape[0], *fused.numbers(x), out.stride(0),
        lead, row_tiles, *w.parts,
        M=c.block_m, N=c.block_n, GROUPS=c.column_groups, STAGES=c.stages, REGISTERS=REGISTERS[c.column_groups],
        KIND=w.kind, SCALE=w.scaling, GROUP=w.group, ASYM=w.zeros is not None,
        X_LAYOUT=x_layout, W_LAYOUT=w_layout, BETWEEN=between, ENDED=ended, STORED=stored,
        HELD=held_layout(c.block_n, w.kind, fused.pair is not None), num_warps=4, **fused.flags(x),
    )  # fmt: skip


def _words(w: QuantMatrix) -> torch.Tensor:
    """The codes as rows of words: of 4 bits a row is an output's chunk, of 8 bits an output."""
    words = w.codes.view(torch.int32 if w.kind == MXFP4.value else torch.int16)
    return words if w.kind == INT8.value else words.view(-1, words.shape[-1])
