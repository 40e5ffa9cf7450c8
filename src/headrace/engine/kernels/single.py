"""Products of one row with quantized weights: those of `headrace.engine.kernels.streamed` with what a single row allows.

Tensor cores multiply eight columns at least, and one row is one of them. Of formats with groups each of the eight takes another
group's inputs and zeros elsewhere, so one accumulator holds eight groups' sums apart. A scale is then loaded by one thread,
once, and multiplied after eight groups instead of after each.

The two codes in a byte of NF4, whose values follow no rule, are looked up in shared memory at once, as the tensor cores want them:
from a table of all 256 bytes, of which every lane has a copy in its own bank. That takes three instructions for two weights,
one of them a load; permuting bytes takes more of the arithmetic units than memory leaves time for. The two codes are of two
groups, so a word of x holds an input of one of them and zero.
"""

# ruff: noqa: RUF005, SIM102, SIM109 - the kernel language has no unpacking and no `in`; the compiler's conditions stand apart

from __future__ import annotations

from functools import cache
from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from headrace.engine.kernels import streamed
from headrace.engine.kernels.activation import act
from headrace.engine.kernels.gemm import MAX_ROWS
from headrace.engine.kernels.quantized import BY_EXPONENT, BY_NESTED, BY_PART, NESTED, part_of
from headrace.engine.kernels.streamed import bytes_of, of_pairs, of_words, product, shifted_of, table_of, x_tile
from headrace.engine.kernels.unpack import (
    FP8,
    INT8,
    MXFP4,
    NF4_CODES,
    fp8_tiny,
    looked_up,
    mxfp4_tiny,
    spread,
    unpacked,
)

ALIKE, BY_COLUMN, PAIRED = (gl.constexpr(i) for i in range(3))
"""What the eight columns are: the row eight times; its groups; its groups, where a word is half of one."""


@cache
def layouts(warps: int, outputs: int) -> dict[str, Any]:
    """Those of `streamed.layouts` that are wanted here."""
    unlike = {"CHUNKS", "FLAT"}
    kept = {name: layout for name, layout in streamed.layouts(warps, outputs).items() if name not in unlike}
    return kept | {"FLAT": gl.BlockedLayout([1], [32], [warps], [0])}


@gluon.jit
def _fetched(
    place, zeros, step, rows_total, KIND: gl.constexpr, GROUP: gl.constexpr, ASYM: gl.constexpr, WARPS: gl.constexpr
):
    """Ask for the codes of a step and its zero points; what a format does not have is the codes again."""
    at, row_at, unit_at = place
    if KIND >= INT8:
        low = gl.load(at + step * (WARPS * 32))
        high = gl.load(at + (step * (WARPS * 32) + 16))
    else:
        low = gl.load(at + gl.to_tensor(step).to(gl.int64) * (rows_total * (WARPS * 16)))
        high = low
    zero, zero2 = low, low
    if ASYM:
        group = (unit_at + step * WARPS) * 128 // GROUP
        zero = gl.load(zeros + (group * rows_total + row_at) // 2)
        zero2 = zero
        if GROUP == 64:
            zero2 = gl.load(zeros + ((group + 1) * rows_total + row_at) // 2)
    return low, high, zero, zero2


@gluon.jit
def _scales_of(
    scales, nested, row, unit, column, turn, groups, rows_total,
    SCALE: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr, STEPS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Ask for the scales [WARPS, outputs, 8] of the groups that the columns hold in a turn of eight."""
    EACH: gl.constexpr = 128 // GROUP if GROUP < 128 else 1
    step = turn * (8 // EACH) + column // EACH
    inside = (step < STEPS) & (unit >= 0) & (row >= 0)
    if GROUP > 128:
        group = (unit + step * WARPS) * 128 // GROUP
    else:
        group = (unit + step * WARPS) * EACH + column % EACH
    if SCALE == BY_NESTED:
        code = gl.load(scales + (group * rows_total + row), inside, 0)
        return code, gl.load(nested + (row * groups + group) // NESTED, inside, 0.0)
    elif SHARED == 1:
        found = gl.load(scales + (group * rows_total + row), inside, 0)
        return found, found
    else:
        found = gl.load(scales + (group * gl.cdiv(rows_total, SHARED) + row // SHARED), inside, 0)
        return found, found


@gluon.jit
def _scaled(total, acc, asked, offset, tables, SCALE: gl.constexpr, UNIT: gl.constexpr):
    """`total` plus the sums of eight groups times their scales, and times what codes and x are too small by."""
    found, step = asked
    if SCALE == BY_NESTED:
        by = gl.load(tables + found.to(gl.int32)) * step + offset
    elif SCALE == BY_EXPONENT:
        by = (found.to(gl.int32) << 23).to(gl.float32, bitcast=True)
    else:
        by = found.to(gl.float32)
    return total + (acc if UNIT == 1.0 else acc * UNIT) * by


@gluon.jit
def _x_words(
    x,
    k,
    column,
    step,
    APART: gl.constexpr,
    PAIRS: gl.constexpr,
    WARPS: gl.constexpr,
    WAY: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Ask for x of the inputs that a step's two tiles multiply, two to a word."""
    at = x + step * (WARPS * 64)
    if WAY == ALIKE:
        return gl.load(at + k), gl.load(at + (k + APART // 2))
    elif WAY == PAIRED:
        found = gl.load(at + k)
        return found, found
    else:
        first = column == step * (128 // GROUP if GROUP < 128 else 1) % 8
        second = first
        if GROUP < 128:
            second = column == step * (128 // GROUP) % 8 + 1
        return gl.load(at + k, first, 0), gl.load(at + (k + APART // 2), second, 0)


@gluon.jit
def _x_tiles(
    words, step, picks,
    KIND: gl.constexpr, RIGHT: gl.constexpr, WARPS: gl.constexpr, WAY: gl.constexpr, LARGE: gl.constexpr, TURN: gl.constexpr,
):  # fmt: skip
    """bf16 [WARPS, 8, 64] twice, as the weights lie."""
    if WAY == PAIRED:
        turn, even, odd = picks
        now = turn == step % TURN
        a, b, c, d = spread(words[0], gl.where(now, even, 0x4444), gl.where(now, odd, 0x4444))
        return gl.convert_layout(of_pairs(a, b), RIGHT), gl.convert_layout(of_pairs(c, d), RIGHT)
    elif WAY == ALIKE:
        return _alike(words[0], RIGHT, WARPS, KIND), _alike(words[1], RIGHT, WARPS, KIND)
    else:
        return x_tile(words[0], RIGHT, KIND, LARGE), x_tile(words[1], RIGHT, KIND, LARGE)


@gluon.jit
def _alike(words, RIGHT: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr):
    row = gl.convert_layout(of_words(words, KIND, False), gl.SliceLayout(1, RIGHT))
    return gl.broadcast(gl.expand_dims(row, 1), gl.zeros([WARPS, 8, 64], gl.int32, RIGHT))[0]


@gluon.jit
def _added(
    acc, got, x_low, x_high, row_at, table,
    KIND: gl.constexpr, ASYM: gl.constexpr, LEFT: gl.constexpr, SUMS: gl.constexpr, WARPS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """acc plus the products of a step."""
    low, high, zero, zero2 = got
    low, high = bytes_of(low, LEFT, WARPS, BLOCK_N), bytes_of(high, LEFT, WARPS, BLOCK_N)
    if KIND == NF4_CODES:
        w, w2 = looked_up(low, gl.full([WARPS, BLOCK_N, 64], table, gl.int32, LEFT))
    elif ASYM:
        w = shifted_of(low, zero, row_at, 0, LEFT, WARPS, BLOCK_N)
        w2 = shifted_of(low, zero2, row_at, 1, LEFT, WARPS, BLOCK_N)
    elif KIND == MXFP4:
        w, w2 = mxfp4_tiny(low, 0), mxfp4_tiny(low, 1)
    elif KIND == FP8:
        w, w2 = fp8_tiny(low), fp8_tiny(high)
    else:
        w, w2 = unpacked(low, KIND, 0), unpacked(high, KIND, 1)
    return product(w2, x_high, product(w, x_low, acc, SUMS, WARPS, BLOCK_N), SUMS, WARPS, BLOCK_N)


@gluon.jit
def _multiplied(
    state, got, got2, x_low, x_high, place, place2, table,
    KIND: gl.constexpr, ASYM: gl.constexpr, PAIR: gl.constexpr, LEFT: gl.constexpr, SUMS: gl.constexpr, WARPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    acc, acc2, total, total2, asked, asked2 = state
    acc = _added(acc, got[0], x_low, x_high, place[1], table, KIND, ASYM, LEFT, SUMS, WARPS, BLOCK_N)
    if PAIR:
        acc2 = _added(acc2, got2[0], x_low, x_high, place2[1], table, KIND, ASYM, LEFT, SUMS, WARPS, BLOCK_N)
    return acc, acc2, total, total2, asked, asked2


@gluon.jit
def _turned(
    state, scaling, turn, PAIR: gl.constexpr, SCALE: gl.constexpr, UNIT: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr,
    STEPS: gl.constexpr, SUMS: gl.constexpr, WARPS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """All columns full: their sums times the scales, and the next scales asked for."""
    acc, acc2, total, total2, asked, asked2 = state
    scales, nested, tables, row, row2, unit, column, offset, offset2, groups, rows_total = scaling
    total = _scaled(total, acc, asked, offset, tables, SCALE, UNIT)
    acc = gl.zeros([WARPS, BLOCK_N, 8], gl.float32, SUMS)
    asked = _scales_of(
        scales, nested, row, unit, column, turn, groups, rows_total, SCALE, GROUP, SHARED, STEPS, WARPS
    )  # fmt: skip
    if PAIR:
        total2 = _scaled(total2, acc2, asked2, offset2, tables, SCALE, UNIT)
        acc2 = gl.zeros([WARPS, BLOCK_N, 8], gl.float32, SUMS)
        asked2 = _scales_of(
            scales, nested, row2, unit, column, turn, groups, rows_total, SCALE, GROUP, SHARED, STEPS, WARPS
        )  # fmt: skip
    return acc, acc2, total, total2, asked, asked2


@gluon.jit
def _places(
    codes, row0, rows_total, inner, KIND: gl.constexpr, WORDS: gl.constexpr, LEFT: gl.constexpr, WARPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Where the codes of step 0 lie, and outputs and units as the weights lie."""
    IN_LEFT: gl.constexpr = gl.SliceLayout(2, LEFT)
    row_at = row0 + gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, IN_LEFT)), 0)
    unit_at = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, IN_LEFT)), 1)
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
    return at, row_at, unit_at


@gluon.jit(do_not_specialize=["rows", "eps", "scale", "count", "first", "second"])
def kernel(
    x, codes, scales, zeros, nested, offsets, tables, bias, squares, gain, residual, out, gained, squares_out,
    rows, columns, inner, rows_total, count, eps, scale, x_stride, out_stride, first, second,
    KIND: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr, ASYM: gl.constexpr,
    STEPS: gl.constexpr, DEPTH: gl.constexpr, WARPS: gl.constexpr, BLOCK_N: gl.constexpr,
    NORM: gl.constexpr, PAIR: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    GAIN: gl.constexpr, PDL: gl.constexpr, WORDS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    PAIRS: gl.constexpr, SUMS: gl.constexpr, FLAT: gl.constexpr, TABLE: gl.constexpr,
):  # fmt: skip
    WAY: gl.constexpr = ALIKE if GROUP == 0 else (PAIRED if KIND == NF4_CODES else BY_COLUMN)
    # Codes are multiplied as if they were bf16 and so are too small by 2^120 or 2^126, x is made larger by 2^64: that takes a
    # multiplication less per weight, and sums are far from either end.
    LARGE: gl.constexpr = KIND == FP8 or KIND == MXFP4
    UNIT: gl.constexpr = (2.0**56 if KIND == FP8 else 2.0**62) if LARGE else 1.0
    # Groups that a step of a warp has, and steps after which eight columns are full.
    EACH: gl.constexpr = 128 // GROUP if GROUP > 0 and GROUP < 128 else 1
    TURN: gl.constexpr = 8 // EACH
    tile = gl.program_id(0)
    row0 = tile * BLOCK_N
    groups = 0 if GROUP == 0 else inner // GROUP
    place = _places(codes, row0, rows_total, inner, KIND, WORDS, LEFT, WARPS, BLOCK_N)
    place2 = place
    if PAIR:
        place2 = _places(codes, columns + row0, rows_total, inner, KIND, WORDS, LEFT, WARPS, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    got, got2 = (), ()
    for s in gl.static_range(DEPTH):
        got += (_fetched(place, zeros, s, rows_total, KIND, GROUP, ASYM, WARPS),)
        if PAIR:
            got2 += (_fetched(place2, zeros, s, rows_total, KIND, GROUP, ASYM, WARPS),)
    acc = gl.zeros([WARPS, BLOCK_N, 8], gl.float32, SUMS)
    acc2, total, total2 = acc, acc, acc
    row = row0 + gl.expand_dims(gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, SUMS))), 0), 2)
    row2 = columns + row
    unit = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS))), 1), 2)
    column = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, SUMS))), 0), 1)
    asked, asked2, offset, offset2 = (row, row), (row, row), row, row
    if GROUP > 0:
        asked = _scales_of(
            scales, nested, row, unit, column, 0, groups, rows_total, SCALE, GROUP, SHARED, STEPS, WARPS
        )  # fmt: skip
        if PAIR:
            asked2 = _scales_of(
                scales, nested, row2, unit, column, 0, groups, rows_total, SCALE, GROUP, SHARED, STEPS, WARPS
            )  # fmt: skip
    if SCALE == BY_NESTED:
        offset = gl.load(offsets + part_of(row, first, second))
        offset2 = gl.load(offsets + part_of(row2, first, second))
    # What the end needs is asked for at the beginning: nothing would hide its latency there.
    n = row0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))
    if GROUP == 0:
        by = gl.load(scales + (part_of(n, first, second) if SCALE == BY_PART else n))
        by2 = by
        if PAIR:
            by2 = gl.load(scales + (part_of(columns + n, first, second) if SCALE == BY_PART else columns + n))
    if BIAS:
        added = gl.load(bias + n).to(gl.float32)
        added2 = added
        if PAIR:
            added2 = gl.load(bias + columns + n).to(gl.float32)
    if GAIN:
        gains = gl.load(gain + n).to(gl.float32)
    table = gl.to_tensor(0)
    if KIND == NF4_CODES:
        table = table_of(tables, TABLE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Sums of squares are asked for now and added up at the end.
    parts = gl.zeros([256], gl.float32, FLAT)
    if NORM:
        t = gl.arange(0, 256, FLAT)
        for t0 in range(0, count, 256):
            parts += gl.load(squares + (t0 + t) * MAX_ROWS, t0 + t < count, 0.0)
    xw = x.to(gl.pointer_type(gl.int32), bitcast=True)
    IN_PAIRS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    kx = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, IN_PAIRS)), 1) * 64
    bx = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, IN_PAIRS)), 0)
    kx += bx // 16 * 32 + bx % 16 if KIND == MXFP4 else bx
    APART: gl.constexpr = 32 if KIND == MXFP4 else 64
    held = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, PAIRS))), 0), 2)
    picks = (held, held, held)
    if WAY != ALIKE:
        kx = gl.expand_dims(kx, 1) + held * 0
        held += kx * 0
        if KIND == MXFP4:
            # Lanes have inputs of either chunk of 64, and so of other groups.
            held -= gl.expand_dims(bx, 1) // 16 * 2
    if WAY == PAIRED:
        kx += held % 2 * (APART // 2)
        picks = (held // 2, gl.where(held % 2 == 0, 0x4410, 0x1044), gl.where(held % 2 == 0, 0x4432, 0x3244))
    AHEAD: gl.constexpr = DEPTH if DEPTH < 2 or (WAY == PAIRED and DEPTH < 4) else (4 if WAY == PAIRED else 2)
    xs = ()
    for s in gl.static_range(AHEAD):
        xs += (_x_words(xw, kx, held, s, APART, PAIRS, WARPS, WAY, GROUP),)
    if RESIDUAL:
        kept = gl.load(residual + n).to(gl.float32)
    state = (acc, acc2, total, total2, asked, asked2)
    scaling = (scales, nested, tables, row, row2, unit, column, offset, offset2, groups, rows_total)
    # fmt: off
    if STEPS > 2 * DEPTH:
        for i in range(0, STEPS - DEPTH, DEPTH):
            for s in gl.static_range(DEPTH):
                x_low, x_high = _x_tiles(xs[0], i + s, picks, KIND, RIGHT, WARPS, WAY, LARGE, TURN)
                state = _multiplied(state, got, got2, x_low, x_high, place, place2, table,
                                    KIND, ASYM, PAIR, LEFT, SUMS, WARPS, BLOCK_N)
                got = got[1:] + (_fetched(place, zeros, i + s + DEPTH, rows_total, KIND, GROUP, ASYM, WARPS),)
                if PAIR:
                    got2 = got2[1:] + (_fetched(place2, zeros, i + s + DEPTH, rows_total, KIND, GROUP, ASYM, WARPS),)
                xs = xs[1:] + (_x_words(xw, kx, held, i + s + AHEAD, APART, PAIRS, WARPS, WAY, GROUP),)
                # No condition that is known to be false: what it guards could not be compiled.
                if GROUP > 0 and (TURN % DEPTH or s == DEPTH - 1):
                    if DEPTH % TURN == 0:
                        if (s + 1) % TURN == 0:
                            state = _turned(state, scaling, (i + s + 1) // TURN, PAIR, SCALE, UNIT, GROUP, SHARED, STEPS,
                                            SUMS, WARPS, BLOCK_N)
                    elif (i + s + 1) % TURN == 0:
                        state = _turned(state, scaling, (i + s + 1) // TURN, PAIR, SCALE, UNIT, GROUP, SHARED, STEPS, SUMS,
                                        WARPS, BLOCK_N)
    LEFT_STEPS: gl.constexpr = DEPTH if STEPS > 2 * DEPTH else STEPS
    for s in gl.static_range(STEPS - LEFT_STEPS, STEPS):
        x_low, x_high = _x_tiles(xs[0], s, picks, KIND, RIGHT, WARPS, WAY, LARGE, TURN)
        state = _multiplied(state, got, got2, x_low, x_high, place, place2, table,
                            KIND, ASYM, PAIR, LEFT, SUMS, WARPS, BLOCK_N)
        got = got[1:]
        if s + DEPTH < STEPS:
            got += (_fetched(place, zeros, s + DEPTH, rows_total, KIND, GROUP, ASYM, WARPS),)
        if PAIR:
            got2 = got2[1:]
            if s + DEPTH < STEPS:
                got2 += (_fetched(place2, zeros, s + DEPTH, rows_total, KIND, GROUP, ASYM, WARPS),)
        xs = xs[1:]
        if s + AHEAD < STEPS:
            xs += (_x_words(xw, kx, held, s + AHEAD, APART, PAIRS, WARPS, WAY, GROUP),)
        if GROUP > 0:
            if (s + 1) % TURN == 0 or s + 1 == STEPS:
                state = _turned(state, scaling, (s + 1) // TURN, PAIR, SCALE, UNIT, GROUP, SHARED, STEPS, SUMS, WARPS, BLOCK_N)
    # fmt: on
    total, total2 = state[2], state[3]
    if GROUP == 0:
        total, total2 = state[0], state[1]
    if GROUP == 0:
        # All columns are alike.
        total, total2 = total * (0.125 * UNIT), total2 * (0.125 * UNIT)
    result = gl.sum(gl.sum(total, 2), 0)
    result2 = result
    if PAIR:
        result2 = gl.sum(gl.sum(total2, 2), 0)
    if GROUP == 0:
        result *= by
        result2 *= by2
    if NORM:
        shrink = gl.rsqrt(gl.sum(parts, 0) / inner + eps)
        result *= shrink
        result2 *= shrink
    if BIAS:
        result += added
        result2 += added2
    if PAIR:
        result = act(result, ACT) * result2
    if RESIDUAL:
        result = result * scale + kept
    rounded = result.to(out.dtype.element_ty)
    gl.store(out + n, rounded)
    if GAIN:
        wide = rounded.to(gl.float32)
        gl.store(squares_out + tile * MAX_ROWS, gl.sum(wide * wide, 0))
        gl.store(gained + n, (wide * gains).to(out.dtype.element_ty))
