"""Products of two to eight rows with quantized weights whose codes go from memory straight to the tensor cores' registers.

`headrace.engine.kernels.quantized` stages codes in shared memory and pays for latencies that so few bytes do not hide. Here a
program has 16 or 32 outputs and its warps share out the inputs, so that nothing but the last sum crosses warps. A thread loads
16 bytes of codes of two outputs at once, as they lie, and they are its part of the tensor cores' left operand: the order of
inputs in a product is free as long as x comes in the same. The first loads are asked for before the kernel waits for the one
that makes x, on which they do not depend.

A single row takes `headrace.engine.kernels.single`.

Written in Gluon, Triton's language with explicit layouts. Gluon has no interpreter: the kernel in `quantized` is the reference.
"""

# ruff: noqa: RUF005 - the kernel language has no unpacking

from __future__ import annotations

from functools import cache
from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from headrace.engine.kernels.activation import act
from headrace.engine.kernels.gemm import MAX_ROWS
from headrace.engine.kernels.quantized import BY_EXPONENT, BY_NESTED, BY_PART, DIRECT_ROWS, NESTED, NF4_BYTES, part_of
from headrace.engine.kernels.unpack import (
    FP8,
    INT8,
    MXFP4,
    NF4_CODES,
    enlarged,
    enlarged_apart,
    fp8_tiny,
    looked_up_apart,
    mxfp4_scaled,
    shifted4,
    table_bank,
    table_filled,
    table_place,
    unpacked,
)

AT_ONCE = gl.constexpr(256)
"""Partial sums of squares that are added up at once."""


@cache
def layouts(warps: int, outputs: int) -> dict[str, Any]:
    """How tensors [warps, outputs, 64 inputs] and [warps, rows, 64 inputs] lie on threads: a thread has 16 neighbouring
    inputs of two outputs in sixteen, or of one row."""
    apart = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    more = [[0, 16 << i, 0] for i in range((outputs // 16).bit_length() - 1)]
    wide = lambda bases: [[*b[:2], b[2] // 32, b[2] % 32] for b in bases]  # noqa: E731
    held, lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 8, 0], *more], [[0, 0, 16], [0, 0, 32]]
    lanes = [*lanes, [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    layout = gl.DistributedLinearLayout
    return {
        "LEFT": layout(held, lanes, apart, [], [warps, outputs, 64]),
        "WORDS": layout(
            [[0, 0, 1], [0, 0, 2], [0, 8, 0], *more], [[0, 0, 4], [0, 0, 8], *lanes[2:]], apart, [], [warps, outputs, 16]
        ),
        "CHUNKS": layout(wide(held), wide(lanes), [[*b, 0] for b in apart], [], [warps, outputs, 2, 32]),
        "RIGHT": layout(
            [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]],
            [[0, 0, 16], [0, 0, 32], [0, 1, 0], [0, 2, 0], [0, 4, 0]], apart, [], [warps, DIRECT_ROWS, 64],
        ),
        "PAIRS": layout(
            [[0, 0, 1], [0, 0, 2], [0, 0, 4]],
            [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]], apart, [], [warps, DIRECT_ROWS, 32],
        ),
        "SUMS": gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8]),
        "FLAT": gl.BlockedLayout([1, 1], [32, 1], [warps, 1], [1, 0]),
        "TABLE": gl.BlockedLayout([1, 1], [4, 8], [warps, 1], [1, 0]),
    }  # fmt: skip


@gluon.jit
def table_of(tables, TABLE: gl.constexpr):
    """Fill shared memory with what bytes of NF4 mean; returns where the calling lane's copy begins."""
    byte = gl.expand_dims(gl.arange(0, 256, gl.SliceLayout(1, TABLE)), 1)
    bank = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, TABLE)), 0)
    word = gl.load(tables.to(gl.pointer_type(gl.int32), bitcast=True) + (NF4_BYTES + byte))
    # Tensors of one element: assembly takes no scalars.
    place = table_place(gl.zeros([1, 1], gl.int32, TABLE))
    table_filled(place + byte * 128 + bank * 16, word + bank * 0)
    gl.thread_barrier()
    return gl.sum(gl.sum(table_bank(place), 1), 0)


@gluon.jit
def product(w, x, acc, SUMS: gl.constexpr, WARPS: gl.constexpr, BLOCK_N: gl.constexpr):
    """acc + w x; the inputs of both get the names that the tensor cores' operands want, and nothing moves."""
    w = w.reshape([WARPS, BLOCK_N, 4, 4, 2, 2]).permute([0, 1, 4, 2, 3, 5]).reshape([WARPS, BLOCK_N, 64])
    x = x.reshape([WARPS, 8, 4, 4, 2, 2]).permute([0, 4, 2, 3, 5, 1]).reshape([WARPS, 64, 8])
    left = gl.convert_layout(w, gl.DotOperandLayout(0, SUMS, 8))
    right = gl.convert_layout(x, gl.DotOperandLayout(1, SUMS, 8))
    return gl.nvidia.ampere.mma_v2(left, right, acc)


@gluon.jit
def _x_words(x, k, step, rows, x_stride, APART: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr):
    """Ask for x of the inputs that a step's two tiles multiply, two to a word; k [WARPS, 32]."""
    m = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))
    m = gl.expand_dims(gl.expand_dims(m, 0), 2)
    inside = gl.broadcast(m < rows, gl.zeros([WARPS, 8, 32], gl.int32, PAIRS))[0]
    places = x + step * (WARPS * 64) + (gl.expand_dims(k, 1) + m * (x_stride // 2))
    return gl.load(places, inside, 0), gl.load(places + APART // 2, inside, 0)


@gluon.jit
def of_words(words, KIND: gl.constexpr, LARGE: gl.constexpr):
    """bf16 [..., 2 n] of words [..., n], of four in the order that codes are unpacked in; `LARGE`: times 2^64."""
    if KIND == FP8:
        low, high = enlarged_apart(words)
        return of_pairs(low, high)
    else:
        if LARGE:
            words = enlarged(words)
        low = words.to(gl.int16).to(gl.bfloat16, bitcast=True)
        both = gl.join(low, (words >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True))
        return both.reshape(words.shape[:-1] + [2 * words.shape[-1]])


@gluon.jit
def of_pairs(a, b):
    """[..., 2 n] of a and b [..., n]: two of a, two of b, and so on."""
    COUNT: gl.constexpr = a.shape[-1]
    HALVES: gl.constexpr = a.shape[:-1] + [COUNT // 2, 2]
    if len(a.shape) == 2:
        both = gl.join(a.reshape(HALVES), b.reshape(HALVES)).permute([0, 1, 3, 2])
    else:
        both = gl.join(a.reshape(HALVES), b.reshape(HALVES)).permute([0, 1, 2, 4, 3])
    return both.reshape(a.shape[:-1] + [2 * COUNT])


@gluon.jit
def x_tile(words, RIGHT: gl.constexpr, KIND: gl.constexpr, LARGE: gl.constexpr = False):
    """bf16 [WARPS, 8, 64] of words [WARPS, 8, 32]."""
    return gl.convert_layout(of_words(words, KIND, LARGE), RIGHT)


@gluon.jit
def _loaded_scale(scales, nested, row, group, groups, rows_total, SCALE: gl.constexpr, SHARED: gl.constexpr):
    if SCALE == BY_NESTED:
        code = gl.load(scales + (group * rows_total + row))
        return code, gl.load(nested + (row * groups + group) // NESTED)
    elif SHARED == 1:
        found = gl.load(scales + (group * rows_total + row))
        return found, found
    else:
        found = gl.load(scales + (group * gl.cdiv(rows_total, SHARED) + row // SHARED))
        return found, found


@gluon.jit
def _scale_value(found, found2, offset, tables, SCALE: gl.constexpr):
    """fp32 [WARPS, BLOCK_N, 1] of what `_loaded_scale` gave."""
    if SCALE == BY_NESTED:
        return gl.expand_dims(gl.load(tables + found.to(gl.int32)) * found2 + offset, 2)
    else:
        return gl.expand_dims(found.to(gl.float32), 2)


@gluon.jit
def _fetched(
    place, given, step,
    KIND: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr, ASYM: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Ask for the codes of a step, its scales and zero points; what a format does not have is the codes again.

    `place`: where the codes of step 0 lie, outputs and units as the sums lie and as the codes lie, and MXFP4's scales of step 0;
    `given`: scales, zero points, scales of scales, groups of an output, outputs.
    """
    scales, zeros, nested, groups, rows_total = given
    at, row, unit, row_at, unit_at, chunk_at = place
    if KIND >= INT8:
        low = gl.load(at + step * (WARPS * 32))
        high = gl.load(at + (step * (WARPS * 32) + 16))
    else:
        low = gl.load(at + gl.to_tensor(step).to(gl.int64) * (rows_total * (WARPS * 16)))
        high = low
    scale, scale2, more, more2, other, other2 = low, low, low, low, low, low
    if SCALE == BY_EXPONENT:
        other = gl.load(scales + (chunk_at + step * (WARPS * 4 * rows_total)))
        other2 = gl.load(scales + (chunk_at + (step * (WARPS * 4) + 1) * rows_total))
    elif GROUP > 0:
        group = (unit + step * WARPS) * 128 // GROUP
        scale, more = _loaded_scale(scales, nested, row, group, groups, rows_total, SCALE, SHARED)
        if GROUP == 64:
            scale2, more2 = _loaded_scale(scales, nested, row, group + 1, groups, rows_total, SCALE, SHARED)
        if ASYM:
            group_at = (unit_at + step * WARPS) * 128 // GROUP
            other = gl.load(zeros + (group_at * rows_total + row_at) // 2)
            other2 = other
            if GROUP == 64:
                other2 = gl.load(zeros + ((group_at + 1) * rows_total + row_at) // 2)
    return low, high, scale, scale2, more, more2, other, other2


@gluon.jit
def _powers(codes, LEFT: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr, BLOCK_N: gl.constexpr):
    """2^(code - 127) as bf16 [WARPS, BLOCK_N, 64] of codes [WARPS, BLOCK_N, 2 chunks]; of code 0 it is 0."""
    by = gl.expand_dims((codes.to(gl.int16) << 7).to(gl.bfloat16, bitcast=True), 3)
    by = gl.broadcast(by, gl.zeros([WARPS, BLOCK_N, 2, 32], gl.int32, CHUNKS))[0]
    return gl.convert_layout(by.reshape([WARPS, BLOCK_N, 64]), LEFT)


@gluon.jit
def shifted_of(
    codes, zeros, row_at, HALF: gl.constexpr, LEFT: gl.constexpr, WARPS: gl.constexpr, BLOCK_N: gl.constexpr
):
    by = (-128 - (zeros.to(gl.int32) >> row_at % 2 * 4 & 15)).to(gl.float32).to(gl.bfloat16)
    by = gl.broadcast(gl.expand_dims(by, 2), gl.zeros([WARPS, BLOCK_N, 64], gl.int32, LEFT))[0]
    return shifted4(codes, by, HALF)


@gluon.jit
def _values(
    low, high, other, other2, row_at, table, KIND: gl.constexpr, ASYM: gl.constexpr, LEFT: gl.constexpr, CHUNKS: gl.constexpr,
    WARPS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """bf16 [WARPS, BLOCK_N, 64] twice; MXFP4's scales and zero points are part of them."""
    if KIND == MXFP4:
        w = mxfp4_scaled(low, _powers(other, LEFT, CHUNKS, WARPS, BLOCK_N), 0)
        return w, mxfp4_scaled(low, _powers(other2, LEFT, CHUNKS, WARPS, BLOCK_N), 1)
    elif KIND == NF4_CODES:
        return looked_up_apart(low, gl.full([WARPS, BLOCK_N, 64], table, gl.int32, LEFT))
    elif ASYM:
        w = shifted_of(low, other, row_at, 0, LEFT, WARPS, BLOCK_N)
        return w, shifted_of(low, other2, row_at, 1, LEFT, WARPS, BLOCK_N)
    elif KIND == FP8:
        return fp8_tiny(low), fp8_tiny(high)
    else:
        return unpacked(low, KIND, 0), unpacked(high, KIND, 1)


@gluon.jit
def bytes_of(words, LEFT: gl.constexpr, WARPS: gl.constexpr, BLOCK_N: gl.constexpr):
    """int8 [WARPS, BLOCK_N, 64] of int32 [WARPS, BLOCK_N, 16]. Words are what a loop carries: bytes would be taken apart."""
    even = gl.join(words.to(gl.int8), (words >> 16).to(gl.int8))
    odd = gl.join((words >> 8).to(gl.int8), (words >> 24).to(gl.int8))
    return gl.convert_layout(gl.join(even, odd).reshape([WARPS, BLOCK_N, 64]), LEFT)


@gluon.jit
def _added(
    acc, got, x_low, x_high, row_at, offset, tables, table,
    KIND: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr, ASYM: gl.constexpr,
    LEFT: gl.constexpr, CHUNKS: gl.constexpr, SUMS: gl.constexpr, WARPS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """acc plus the products of a step."""
    low, high, scale, scale2, more, more2, other, other2 = got
    low, high = bytes_of(low, LEFT, WARPS, BLOCK_N), bytes_of(high, LEFT, WARPS, BLOCK_N)
    w, w2 = _values(low, high, other, other2, row_at, table, KIND, ASYM, LEFT, CHUNKS, WARPS, BLOCK_N)
    if GROUP == 0 or SCALE == BY_EXPONENT:
        acc = product(w, x_low, acc, SUMS, WARPS, BLOCK_N)
        acc = product(w2, x_high, acc, SUMS, WARPS, BLOCK_N)
    else:
        zero = gl.zeros([WARPS, BLOCK_N, 8], gl.float32, SUMS)
        part = product(w, x_low, zero, SUMS, WARPS, BLOCK_N)
        if GROUP == 64:
            acc += part * _scale_value(scale, more, offset, tables, SCALE)
            part = product(w2, x_high, zero, SUMS, WARPS, BLOCK_N)
            acc += part * _scale_value(scale2, more2, offset, tables, SCALE)
        else:
            part = product(w2, x_high, part, SUMS, WARPS, BLOCK_N)
            acc += part * _scale_value(scale, more, offset, tables, SCALE)
    return acc


@gluon.jit
def _places(
    codes, row0, rows_total, inner, KIND: gl.constexpr, WORDS: gl.constexpr, LEFT: gl.constexpr, CHUNKS: gl.constexpr, SUMS: gl.constexpr,
    WARPS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """See `_fetched`."""
    IN_SUMS: gl.constexpr = gl.SliceLayout(2, SUMS)
    IN_LEFT: gl.constexpr = gl.SliceLayout(2, LEFT)
    IN_CHUNKS: gl.constexpr = gl.SliceLayout(3, CHUNKS)
    row = row0 + gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, IN_SUMS)), 0)
    unit = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, IN_SUMS)), 1)
    row_at = row0 + gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, IN_LEFT)), 0)
    unit_at = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, IN_LEFT)), 1)
    # Scales of a byte's low halves in either chunk of 64 inputs; those of the high halves are of the next group.
    u = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, IN_CHUNKS))), 1), 2)
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, IN_CHUNKS))), 0), 2)
    c = gl.expand_dims(gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, IN_CHUNKS))), 0), 0)
    chunk_at = (u * 4 + c * 2) * rows_total + (row0 + r)
    IN_WORDS: gl.constexpr = gl.SliceLayout(2, WORDS)
    word = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(0, WORDS))), 0), 0)
    n = row0 + gl.expand_dims(gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, IN_WORDS)), 0), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, IN_WORDS)), 1), 2)
    words = codes.to(gl.pointer_type(gl.int32), bitcast=True)
    if KIND >= INT8:
        at = words + (n.to(gl.int64) * (inner // 4) + (k * 32 + word))
    elif KIND == MXFP4:
        at = words + (((k * 2 + word // 8) * rows_total + n) * 8 + word % 8)
    else:
        at = words + ((k * rows_total + n) * 16 + word)
    return at, row, unit, row_at, unit_at, chunk_at


@gluon.jit(do_not_specialize=["rows", "eps", "scale", "count", "first", "second"])
def kernel(
    x, codes, scales, zeros, nested, offsets, tables, bias, squares, gain, residual, out, gained, squares_out,
    rows, columns, inner, rows_total, count, eps, scale, x_stride, out_stride, first, second,
    KIND: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr, ASYM: gl.constexpr,
    STEPS: gl.constexpr, DEPTH: gl.constexpr, WARPS: gl.constexpr, BLOCK_N: gl.constexpr,
    NORM: gl.constexpr, PAIR: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    GAIN: gl.constexpr, PDL: gl.constexpr, WORDS: gl.constexpr, LEFT: gl.constexpr, CHUNKS: gl.constexpr, RIGHT: gl.constexpr,
    PAIRS: gl.constexpr, SUMS: gl.constexpr, FLAT: gl.constexpr, TABLE: gl.constexpr,
):  # fmt: skip
    tile = gl.program_id(0)
    row0 = tile * BLOCK_N
    groups = 0 if GROUP == 0 else inner // GROUP
    place = _places(codes, row0, rows_total, inner, KIND, WORDS, LEFT, CHUNKS, SUMS, WARPS, BLOCK_N)
    offset = gl.zeros([WARPS, BLOCK_N], gl.float32, gl.SliceLayout(2, SUMS))
    place2, offset2 = place, offset
    if PAIR:
        place2 = _places(codes, columns + row0, rows_total, inner, KIND, WORDS, LEFT, CHUNKS, SUMS, WARPS, BLOCK_N)
    if SCALE == BY_NESTED:
        offset = gl.load(offsets + part_of(place[1] + place[2] * 0, first, second))
        offset2 = gl.load(offsets + part_of(place2[1] + place[2] * 0, first, second))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # fmt: off
    given = (scales, zeros, nested, groups, rows_total)
    got, got2 = (), ()
    for s in gl.static_range(DEPTH):
        got += (_fetched(place, given, s, KIND, SCALE, GROUP, SHARED, ASYM, WARPS),)
        if PAIR:
            got2 += (_fetched(place2, given, s, KIND, SCALE, GROUP, SHARED, ASYM, WARPS),)
    # fmt: on
    # What the end needs is asked for at the beginning: nothing would hide its latency there.
    ENDS: gl.constexpr = gl.SliceLayout(0, SUMS)
    n_flat = row0 + gl.arange(0, BLOCK_N, gl.SliceLayout(1, ENDS))
    if GROUP == 0:
        by = gl.load(scales + (part_of(n_flat, first, second) if SCALE == BY_PART else n_flat))
        if PAIR:
            n2 = columns + n_flat
            by2 = gl.load(scales + (part_of(n2, first, second) if SCALE == BY_PART else n2))
    if BIAS:
        added = gl.load(bias + n_flat).to(gl.float32)
        if PAIR:
            added2 = gl.load(bias + columns + n_flat).to(gl.float32)
    if GAIN:
        gains = gl.load(gain + n_flat).to(gl.float32)
    table = 0
    if KIND == NF4_CODES:
        table = table_of(tables, TABLE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Sums of squares are asked for now and added up at the end.
    m_flat = gl.arange(0, 8, gl.SliceLayout(0, FLAT))
    parts = gl.zeros([AT_ONCE, 8], gl.float32, FLAT)
    if NORM:
        t = gl.expand_dims(gl.arange(0, AT_ONCE, gl.SliceLayout(1, FLAT)), 1)
        m_in = gl.expand_dims(m_flat < rows, 0)
        for t0 in range(0, count, AT_ONCE):
            parts += gl.load(squares + ((t0 + t) * MAX_ROWS + gl.expand_dims(m_flat, 0)), (t0 + t < count) & m_in, 0.0)
    m = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, ENDS)), 0)
    n = gl.expand_dims(n_flat, 1)
    inside = (m < rows) & (n >= 0)
    target = m * out_stride + n
    if RESIDUAL:
        kept = gl.load(residual + target, inside, 0.0).to(gl.float32)
    xw = x.to(gl.pointer_type(gl.int32), bitcast=True)
    kx = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(1, PAIRS))), 1) * 64
    bx = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, PAIRS))), 0)
    kx += bx // 16 * 32 + bx % 16 if KIND == MXFP4 else bx
    APART: gl.constexpr = 32 if KIND == MXFP4 else 64
    acc = gl.zeros([WARPS, BLOCK_N, 8], gl.float32, SUMS)
    acc2 = acc
    xs = _x_words(xw, kx, 0, rows, x_stride, APART, PAIRS, WARPS)
    # fmt: off
    for i in range(0, STEPS - DEPTH, DEPTH):
        for s in gl.static_range(DEPTH):
            ahead = _x_words(xw, kx, i + s + 1, rows, x_stride, APART, PAIRS, WARPS)
            x_low, x_high = x_tile(xs[0], RIGHT, KIND), x_tile(xs[1], RIGHT, KIND)
            acc = _added(acc, got[0], x_low, x_high, place[3], offset, tables, table,
                         KIND, SCALE, GROUP, ASYM, LEFT, CHUNKS, SUMS, WARPS, BLOCK_N)
            got = got[1:] + (_fetched(place, given, i + s + DEPTH, KIND, SCALE, GROUP, SHARED, ASYM, WARPS),)
            if PAIR:
                acc2 = _added(acc2, got2[0], x_low, x_high, place2[3], offset2, tables, table,
                              KIND, SCALE, GROUP, ASYM, LEFT, CHUNKS, SUMS, WARPS, BLOCK_N)
                got2 = got2[1:] + (_fetched(place2, given, i + s + DEPTH, KIND, SCALE, GROUP, SHARED, ASYM, WARPS),)
            xs = ahead
    for s in gl.static_range(DEPTH):
        ahead = xs
        if s < DEPTH - 1:
            ahead = _x_words(xw, kx, STEPS - DEPTH + s + 1, rows, x_stride, APART, PAIRS, WARPS)
        x_low, x_high = x_tile(xs[0], RIGHT, KIND), x_tile(xs[1], RIGHT, KIND)
        acc = _added(acc, got[s], x_low, x_high, place[3], offset, tables, table,
                     KIND, SCALE, GROUP, ASYM, LEFT, CHUNKS, SUMS, WARPS, BLOCK_N)
        if PAIR:
            acc2 = _added(acc2, got2[s], x_low, x_high, place2[3], offset2, tables, table,
                          KIND, SCALE, GROUP, ASYM, LEFT, CHUNKS, SUMS, WARPS, BLOCK_N)
        xs = ahead
    # fmt: on
    total = gl.sum(acc, 0)
    total2 = total
    if PAIR:
        total2 = gl.sum(acc2, 0)
    if KIND == FP8:
        # Codes as they are times 2^-120, x times 2^64: a multiplication less per weight, and sums are far from either end.
        total *= 2.0**56
        total2 *= 2.0**56
    if GROUP == 0:
        total *= gl.expand_dims(by, 1)
        if PAIR:
            total2 *= gl.expand_dims(by2, 1)
    if NORM:
        shrink = gl.rsqrt(gl.sum(parts, 0) / inner + eps)
        shrink = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(0, ENDS)), 0)
        total *= shrink
        total2 *= shrink
    if BIAS:
        total += gl.expand_dims(added, 1)
        if PAIR:
            total2 += gl.expand_dims(added2, 1)
    if PAIR:
        total = act(total, ACT) * total2
    if RESIDUAL:
        total = total * scale + kept
    rounded = total.to(out.dtype.element_ty)
    gl.store(out + target, rounded, inside)
    if GAIN:
        wide = gl.where(inside, rounded.to(gl.float32), 0.0)
        sums = gl.sum(wide * wide, 0)
        m_out = gl.arange(0, 8, gl.SliceLayout(0, ENDS))
        gl.store(squares_out + tile * MAX_ROWS + m_out, sums, m_out < rows)
        wide = wide * gl.expand_dims(gains, 1)
        gl.store(gained + target, wide.to(out.dtype.element_ty), inside)
