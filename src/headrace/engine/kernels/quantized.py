"""Matrix products of few rows with quantized weights: codes stream from memory and become bf16 in registers.

As in `headrace.engine.kernels.gemm` bandwidth is all, now of 4 or 8 bits per weight, and the same work is fused in. Weights are
the left operand of the tensor cores, so that what is unpacked in registers is multiplied from there; the rows of x are the
right one. Scales never touch a weight: a group's products are summed apart and the sum is multiplied. A zero point z takes
z · Σ x off a group's sum; Σ x comes from a product with ones.

Layouts. Codes of 8 bits lie in rows as in their format. Those of 4 bits are permuted when a matrix is loaded: inputs in chunks,
[inputs / chunk, outputs, chunk / 2 bytes], so that what a program reads at once is one run, and a byte holds a weight of the
chunk's first half below one of its second, so that a tile's bytes are the two tiles of either half (of MXFP4 four bytes hold
four weights of either, bit by bit: `headrace.engine.kernels.unpack`). Chunks are of 128
inputs, of 64 where a group is of 32 or the inputs are no multiple of 128. Scales lie by group, [groups, outputs].
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from headrace.engine.kernels.activation import act
from headrace.engine.kernels.decode import arrived_last
from headrace.engine.kernels.gemm import MAX_ROWS, Fused, Gained, GemmConfig, GemmWorkspace, prefetch, shrink_of, sizes
from headrace.engine.kernels.launchers import power_of_2
from headrace.engine.kernels.unpack import FP8, INT4, MXFP4, MXFP4_BITS, NF4_CODES, byte_words, unpacked, valued
from headrace.engine.quant.tables import DYNAMIC, NF4

log = logging.getLogger("headrace.engine")

CHUNK = 64
"""What the inputs must be a multiple of."""
BY_ROW, BY_PART, BY_GROUP, BY_EXPONENT, BY_NESTED = (tl.constexpr(i) for i in range(5))
"""What a scale is: fp32 of an output, of each of up to three matrices joined, a float of a group, a power of two of a group, an
8-bit code of a group with one fp32 for 256 of them."""
NESTED = tl.constexpr(256)
DIRECT_ROWS = 8
"""Rows that `headrace.engine.kernels.streamed` takes at most: what the tensor cores' right operand holds."""
_BITS = tl.constexpr(MXFP4_BITS)
NF4_BYTES = tl.constexpr(272)
"""Where in `constants` the words begin that bytes of NF4 mean."""
DIRECT_INPUTS = 128
"""Inputs that one of its warps takes at once."""


@triton.jit
def part_of(row, first, second):
    """Which of up to three joined matrices an output is of; the second and the third begin at `first` and `second`."""
    return (row >= first).to(tl.int32) + (row >= second).to(tl.int32)


@triton.jit
def _scales(
    scales, nested, offsets, tables, row, inside, group, groups, rows_total, first, second,
    SCALE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """fp32 scales of a group of each output in `row`, 0 outside."""
    if SCALE == BY_EXPONENT:
        code = tl.load(scales + group * rows_total + row, inside, 0).to(tl.int32)
        # 2^(code - 127) as its bits; code 0 would be the subnormal 2^-127 and is taken for 0.
        return (code << 23).to(tl.float32, bitcast=True)
    elif SCALE == BY_NESTED:
        code = tl.load(scales + group * rows_total + row, inside, 0).to(tl.int32)
        step = tl.load(nested + (row * groups + group) // NESTED, inside, 0.0)
        return tl.load(tables + code) * step + tl.load(offsets + part_of(row, first, second))
    elif SCALE == BY_GROUP:
        return tl.load(scales + group * tl.cdiv(rows_total, SHARED) + row // SHARED, inside, 0.0).to(tl.float32)
    elif SCALE == BY_PART:
        return tl.load(scales + part_of(row, first, second) + tl.zeros_like(row), inside, 0.0)
    else:
        return tl.load(scales + row, inside, 0.0)


@triton.jit
def _codes4(codes, row, inside, rows_total, chunk, BYTES: tl.constexpr, EVEN: tl.constexpr):
    """The bytes [outputs, BYTES] of a chunk; `unpacked` makes either half of them."""
    at = codes + chunk.to(tl.int64) * (rows_total * BYTES) + (row[:, None] * BYTES + tl.arange(0, BYTES)[None, :])
    return tl.load(at) if EVEN else tl.load(at, inside[:, None], 0)


@triton.jit
def _plain4(codes, table, row, inside, rows_total, chunk, KIND: tl.constexpr, HALF: tl.constexpr, BYTES: tl.constexpr):
    """fp32 values [outputs, BYTES] of half a chunk."""
    k = tl.arange(0, BYTES)[None, :]
    at = codes + (chunk.to(tl.int64) * rows_total + row[:, None]) * BYTES
    if KIND == MXFP4:
        at += k // 4 * 4 + k % 2 * 2
        low = tl.load(at, inside[:, None], 0).to(tl.uint8, bitcast=True).to(tl.int32)
        both = low | tl.load(at + 1, inside[:, None], 0).to(tl.uint8, bitcast=True).to(tl.int32) << 8
        second = k // 2 % 2 == 1
        sign = tl.where(second, _BITS[2 * HALF + 1][0], _BITS[2 * HALF][0])
        size = tl.where(second, _BITS[2 * HALF + 1][1], _BITS[2 * HALF][1])
        return valued((both >> sign & 1) << 3 | both >> size & 7, table, KIND)
    code = tl.load(at + k, inside[:, None], 0).to(tl.uint8, bitcast=True).to(tl.int32)
    return valued(code >> (4 * HALF) & 15, table, KIND)


@triton.jit
def _multiplied(
    x, codes, scales, zeros, nested, offsets, tables, acc, row, inside, begin, stop,
    rows, inner, rows_total, x_stride, first, second,
    KIND: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, ASYM: tl.constexpr,
    BYTES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] plus the products of inputs [begin, stop), scales of groups applied."""
    m = tl.arange(0, BLOCK_M)
    BITS4: tl.constexpr = KIND <= NF4_CODES
    # Inputs of one product; as many products as share a scale are added up first.
    SPAN: tl.constexpr = BYTES if BITS4 else (BLOCK_K if GROUP == 0 else GROUP)
    PARTS: tl.constexpr = 1 if GROUP == 0 else GROUP // SPAN
    kind = x.dtype.element_ty
    there = m[None, :] < rows
    x_at = m[None, :] * x_stride + tl.arange(0, SPAN)[:, None]
    groups = 0 if GROUP == 0 else inner // GROUP
    # Scales are fetched one group ahead: they are too narrow for asynchronous copies.
    step = tl.zeros([BLOCK_N], tl.float32)
    following = step
    if GROUP > 0:
        following = _scales(
            scales, nested, offsets, tables, row, inside, begin // GROUP, groups, rows_total, first, second, SCALE, SHARED
        )  # fmt: skip
    for k0 in tl.range(begin, stop, BLOCK_K, num_stages=STAGES):
        part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        ones = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        packed = tl.zeros([BLOCK_N, BYTES], tl.int8)
        for s in tl.static_range(BLOCK_K // SPAN):
            k = k0 + s * SPAN
            if GROUP > 0 and s % PARTS == 0:
                step = following
                following = _scales(
                    scales, nested, offsets, tables, row, inside, tl.minimum(k // GROUP + 1, groups - 1), groups,
                    rows_total, first, second, SCALE, SHARED,
                )  # fmt: skip
            a = tl.load(x + k + x_at, there, 0.0)
            if BITS4:
                chunk = k0 // (2 * BYTES) + s // 2
                if FAST:
                    if s % 2 == 0:
                        packed = _codes4(codes, row, inside, rows_total, chunk, BYTES, EVEN)
                        w = unpacked(packed, KIND, 0)
                    else:
                        w = unpacked(packed, KIND, 1)
                else:
                    if s % 2 == 0:
                        w = _plain4(codes, tables, row, inside, rows_total, chunk, KIND, 0, BYTES).to(kind)
                    else:
                        w = _plain4(codes, tables, row, inside, rows_total, chunk, KIND, 1, BYTES).to(kind)
            else:
                at = codes + k + (row.to(tl.int64)[:, None] * inner + tl.arange(0, SPAN)[None, :])
                code = tl.load(at) if EVEN else tl.load(at, inside[:, None], 0)
                if FAST:
                    w = unpacked(code, KIND, 0)
                else:
                    w = valued(code.to(tl.uint8, bitcast=True).to(tl.int32), tables, KIND).to(kind)
            if GROUP == 0:
                acc = tl.dot(w, a, acc, input_precision="ieee")
            else:
                part = tl.dot(w, a, part, input_precision="ieee")
                if ASYM:
                    ones = tl.dot(tl.full([BLOCK_N, SPAN], 1.0, kind), a, ones, input_precision="ieee")
                if s % PARTS == PARTS - 1:
                    if ASYM:
                        place = k // GROUP * rows_total + row
                        if KIND == INT4:
                            zero = (tl.load(zeros + place // 2, inside, 0).to(tl.int32) >> place % 2 * 4 & 15) - 8
                        else:
                            zero = tl.load(zeros + place, inside, 0).to(tl.int32) - 128
                        part -= ones * zero.to(tl.float32)[:, None]
                        ones = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                    acc += part * step[:, None]
                    part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    return acc


@triton.jit
def _ahead(
    codes, scales, row0, rows_total, inner, begin, stop, KIND: tl.constexpr, GROUP: tl.constexpr,
    SHARED: tl.constexpr, BYTES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Bring the first 16 or 32 KiB of codes, and the first scales of groups, into the L2 cache, no line twice on purpose: many
    requests for one line would wait for each other."""
    if KIND <= NF4_CODES:
        LINES: tl.constexpr = BLOCK_N * BYTES // 128  # of a chunk
        i = tl.arange(0, 128)
        chunk = tl.minimum(begin // (2 * BYTES) + i // LINES, stop // (2 * BYTES) - 1)
        prefetch(codes + chunk.to(tl.int64) * (rows_total * BYTES) + row0 * BYTES + i % LINES * 128)
    else:
        i = tl.arange(0, 256)
        k = tl.minimum(begin + i // BLOCK_N * 128, stop - 1)
        prefetch(codes + (row0 + i % BLOCK_N).to(tl.int64) * inner + k)
    if GROUP > 0 and SHARED == 1:
        group = tl.minimum(begin // GROUP + tl.arange(0, 32), stop // GROUP - 1)
        prefetch(scales + group * rows_total + row0)


@triton.jit(do_not_specialize=["rows", "eps", "scale", "count", "first", "second"])
def _quantized(
    x, codes, scales, zeros, nested, offsets, tables, bias, squares, gain, residual, out, gained, squares_out, parts,
    counters, rows, columns, inner, rows_total, count, eps, scale, x_stride, out_stride, first, second,
    KIND: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, ASYM: tl.constexpr,
    BYTES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    NORM: tl.constexpr, PAIR: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    GAIN: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = n < columns
    steps = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLIT_K)
    begin = part * steps * BLOCK_K
    stop = tl.minimum(begin + steps * BLOCK_K, inner)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if EVEN:
            n0 = tile * BLOCK_N
            _ahead(codes, scales, n0, rows_total, inner, begin, stop, KIND, GROUP, SHARED, BYTES, BLOCK_N)
            if PAIR:
                _ahead(codes, scales, columns + n0, rows_total, inner, begin, stop, KIND, GROUP, SHARED, BYTES, BLOCK_N)
        tl.extra.cuda.gdc_wait()
    acc = _multiplied(
        x, codes, scales, zeros, nested, offsets, tables, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), n, n_inside,
        begin, stop, rows, inner, rows_total, x_stride, first, second,
        KIND, SCALE, GROUP, SHARED, ASYM, BYTES, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, FAST, STAGES,
    )  # fmt: skip
    acc2 = acc
    if PAIR:
        acc2 = _multiplied(
            x, codes, scales, zeros, nested, offsets, tables, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), columns + n,
            n_inside, begin, stop, rows, inner, rows_total, x_stride, first, second,
            KIND, SCALE, GROUP, SHARED, ASYM, BYTES, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, FAST, STAGES,
        )  # fmt: skip
    inside = (m[None, :] < rows) & n_inside[:, None]
    last = True
    if SPLIT_K > 1:
        at = (part * BLOCK_M + m[None, :]) * (columns * (2 if PAIR else 1)) + n[:, None]
        tl.store(parts + at, acc, inside)
        if PAIR:
            tl.store(parts + at + columns, acc2, inside)
        tl.debug_barrier()
        last = arrived_last(counters + tile, SPLIT_K)
        if last:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            acc2 = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for p in tl.static_range(SPLIT_K):
                at = (p * BLOCK_M + m[None, :]) * (columns * (2 if PAIR else 1)) + n[:, None]
                acc += tl.load(parts + at, inside, 0.0, cache_modifier=".cg")
                if PAIR:
                    acc2 += tl.load(parts + at + columns, inside, 0.0, cache_modifier=".cg")
    if last:
        if GROUP == 0:
            by = _scales(
                scales, nested, offsets, tables, n, n_inside, 0, 1, rows_total, first, second, SCALE, SHARED
            )  # fmt: skip
            acc *= by[:, None]
            if PAIR:
                by = _scales(
                    scales, nested, offsets, tables, columns + n, n_inside, 0, 1, rows_total, first, second, SCALE,
                    SHARED,
                )  # fmt: skip
                acc2 *= by[:, None]
        if NORM:
            shrink = tl.trans(shrink_of(squares, count, m, rows, inner, eps, BLOCK_M))
            acc = acc * shrink
            acc2 = acc2 * shrink
        if BIAS:
            acc += tl.load(bias + n, n_inside, 0.0).to(tl.float32)[:, None]
            if PAIR:
                acc2 += tl.load(bias + columns + n, n_inside, 0.0).to(tl.float32)[:, None]
        if PAIR:
            acc = act(acc, ACT) * acc2
        target = m[None, :] * out_stride + n[:, None]
        if RESIDUAL:
            acc = acc * scale + tl.load(residual + target, inside, 0.0).to(tl.float32)
        rounded = acc.to(out.dtype.element_ty)
        tl.store(out + target, rounded, inside)
        if GAIN:
            wide = tl.where(inside, rounded.to(tl.float32), 0.0)
            tl.store(squares_out + tile * MAX_ROWS + m, tl.sum(wide * wide, 0), m < rows)
            wide = wide * tl.load(gain + n, n_inside, 0.0).to(tl.float32)[:, None]
            tl.store(gained + target, wide.to(out.dtype.element_ty), inside)


@dataclass(frozen=True, slots=True)
class QuantMatrix:
    """A matrix [outputs, inputs] on the device as `quantized_gemm` reads it; `tensors` are all that it holds.

    `codes` and `scales` as the module says; `zeros` [groups, outputs / 2] bytes; `nested` and `offsets` of scales that are
    quantized themselves. `parts`: where the second and third of joined matrices begin. `act_codes`: activations of many rows
    are rounded to this type.
    """

    form: str
    kind: int
    scaling: int
    group: int
    shape: tuple[int, int]
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    nested: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    shared: int = 1
    parts: tuple[int, int] = (1 << 30, 1 << 30)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk of 4-bit codes of an output; 8-bit ones have no chunks."""
        return 32 if self.codes.dim() == 2 else self.codes.shape[2]

    def tensors(self) -> list[torch.Tensor]:
        found = (self.codes, self.scales, self.zeros, self.nested, self.offsets)
        return [t for t in found if t is not None]

    def given(self, some: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What launches are given from the scales to the tables; `some` stands for what there is none of."""
        scales = self.scales.view(torch.uint8) if self.scales.element_size() == 1 else self.scales
        others = (some if t is None else t for t in (self.zeros, self.nested, self.offsets))
        return (scales, *others, constants(some.device))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())


@cache
def has_gluon() -> bool:
    """Whether this Triton has the language that `headrace.engine.kernels.streamed` is written in (3.6 has)."""
    try:
        from headrace.engine.kernels import streamed  # noqa: F401
    except (ImportError, AttributeError) as error:
        log.warning(
            "products of single rows are slower than they could be: this Triton has no usable Gluon (%s)", error
        )
        return False
    return True


def not_direct(w: QuantMatrix, columns: int, config: GemmConfig) -> str | None:
    """Why a product of `columns` outputs with `w` cannot take `headrace.engine.kernels.streamed`; None if it can."""
    bits4, mxfp4 = w.kind <= NF4_CODES.value, w.kind == MXFP4.value
    if w.group and w.group != 64 and w.group % DIRECT_INPUTS and not mxfp4:
        return f"groups of {w.group} are parts of a tile"
    if bits4 and w.chunk_bytes != (32 if mxfp4 else 64):
        return f"its chunks are of {2 * w.chunk_bytes} inputs"
    if w.zeros is not None and not bits4:
        return "zero points of 8 bits are not read"
    if (inner := w.shape[1]) % (DIRECT_INPUTS * config.num_warps * config.stages):
        return f"{inner} inputs are not whole steps of {config.num_warps} warps"
    if columns % config.block_n:
        return f"{columns} outputs are not a multiple of {config.block_n}"
    return None


def not_specialized(w: QuantMatrix, config: GemmConfig) -> str | None:
    """Why a product with `w` cannot take `headrace.engine.kernels.quantized_hopper`; None if it can."""
    if w.kind == FP8.value or w.shared != 1:
        return f"{w.form} is not unpacked there"
    if w.kind in (INT4.value, NF4_CODES.value) and w.chunk_bytes != 64:
        return f"its chunks are of {2 * w.chunk_bytes} inputs"
    if w.group and w.kind != MXFP4.value and w.group not in (64, 128):
        return f"groups of {w.group} are no halves of a block"
    if w.zeros is not None and w.kind != INT4.value:
        return "zero points of 8 bits are not read"
    if w.shape[1] % DIRECT_INPUTS:
        return f"{w.shape[1]} inputs are not a multiple of {DIRECT_INPUTS}"
    if w.shape[0] % (config.block_n * config.column_groups):
        return f"{w.shape[0]} outputs are not whole tiles of {config.block_n * config.column_groups}"
    return None


def quantized_gemm(
    x: torch.Tensor | Gained,
    w: QuantMatrix,
    out: torch.Tensor,
    work: GemmWorkspace,
    config: GemmConfig,
    **given: Any,
) -> None:
    """`headrace.engine.kernels.gemm.skinny_gemm` with quantized weights. The inner steps of `config` must divide the inputs;
    to a direct one `not_direct` must have no objection, to one with `block_m` `not_specialized`; with either, activations
    are bf16."""
    if config.block_m:
        from headrace.engine.kernels.quantized_hopper import hopper_quantized_gemm

        hopper_quantized_gemm(x, w, out, work, config, **given)
        return
    fused = Fused(**given)
    source, rows, columns, inner = sizes(x, w.shape[0], fused)
    c = config
    tiles = -(-columns // c.block_n)
    fused.leaves(tiles)
    *tensors, parts, counters = (source, w.codes.view(torch.int8), *w.given(work.parts), *fused.tensors(x, out, work))
    numbers = (rows, columns, inner, w.shape[0], *fused.numbers(x), source.stride(0), out.stride(0), *w.parts)
    flags = {
        "KIND": w.kind, "SCALE": w.scaling, "GROUP": w.group, "SHARED": w.shared, "ASYM": w.zeros is not None,
        "BLOCK_N": c.block_n, "num_warps": c.num_warps, **fused.flags(x),
    }  # fmt: skip
    if c.direct:
        from headrace.engine.kernels import single, streamed

        assert rows <= (c.rows or DIRECT_ROWS)
        assert source.dtype == torch.bfloat16
        assert (why := not_direct(w, columns, c)) is None, why
        way = single if c.rows == 1 else streamed
        way.kernel[(tiles,)](
            *tensors, *numbers, **flags, **way.layouts(c.num_warps, c.block_n), WARPS=c.num_warps,
            STEPS=inner // (DIRECT_INPUTS * c.num_warps), DEPTH=c.stages,
            **({"maxnreg": c.registers} if c.registers else {}),
        )  # fmt: skip
        return
    block_m = max(8, c.rows, power_of_2(rows))
    assert inner % (c.block_k * c.split_k) == 0
    assert c.block_k % max(w.group, 2 * w.chunk_bytes) == 0
    assert rows <= MAX_ROWS.value
    assert c.split_k == 1 or c.split_k * block_m * w.shape[0] <= work.parts.numel()
    assert c.split_k == 1 or tiles <= work.counters.numel()
    _quantized[(tiles, c.split_k)](
        *tensors, parts, counters, *numbers, **flags,
        BYTES=w.chunk_bytes, BLOCK_M=block_m, BLOCK_K=c.block_k, SPLIT_K=c.split_k, EVEN=columns % c.block_n == 0,
        FAST=source.dtype == torch.bfloat16 and source.is_cuda, STAGES=c.stages,
    )  # fmt: skip


@cache
def constants(device: torch.device) -> torch.Tensor:
    """The values of nested scales' codes, after them those of NF4's codes, and the bits of `byte_words`."""
    return torch.cat([torch.from_numpy(np.concatenate([DYNAMIC, NF4])), byte_words()]).to(device)


@triton.jit(do_not_specialize=["first", "second"])
def _dequantize(
    codes, scales, zeros, nested, offsets, tables, out, rows_total, inner, first, second,
    KIND: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, ASYM: tl.constexpr,
    BYTES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < rows_total
    BITS4: tl.constexpr = KIND <= NF4_CODES
    SPAN: tl.constexpr = BYTES if BITS4 else (32 if GROUP == 32 else 64)
    kind = out.dtype.element_ty
    k0 = tl.program_id(1) * BLOCK_K
    packed = tl.zeros([BLOCK_N, BYTES], tl.int8)
    groups = 1 if GROUP == 0 else inner // GROUP
    for s in tl.static_range(BLOCK_K // SPAN):
        begin = k0 + s * SPAN
        k = begin + tl.arange(0, SPAN)
        there = inside[:, None] & (k[None, :] < inner)
        if BITS4:
            chunk = k0 // (2 * BYTES) + s // 2
            readable = inside & (begin < inner)
            if FAST:
                if s % 2 == 0:
                    packed = _codes4(codes, row, readable, rows_total, chunk, BYTES, False)
                    w = unpacked(packed, KIND, 0)
                else:
                    w = unpacked(packed, KIND, 1)
            else:
                if s % 2 == 0:
                    w = _plain4(codes, tables, row, readable, rows_total, chunk, KIND, 0, BYTES)
                else:
                    w = _plain4(codes, tables, row, readable, rows_total, chunk, KIND, 1, BYTES)
        else:
            code = tl.load(codes + row.to(tl.int64)[:, None] * inner + k[None, :], there, 0)
            if FAST:
                w = unpacked(code, KIND, 0)
            else:
                w = valued(code.to(tl.uint8, bitcast=True).to(tl.int32), tables, KIND)
        value = w.to(tl.float32)
        group = 0 if GROUP == 0 else tl.minimum(begin // GROUP, groups - 1)
        if ASYM:
            place = group * rows_total + row
            if KIND == INT4:
                zero = (tl.load(zeros + place // 2, inside, 0).to(tl.int32) >> place % 2 * 4 & 15) - 8
            else:
                zero = tl.load(zeros + place, inside, 0).to(tl.int32) - 128
            value -= zero.to(tl.float32)[:, None]
        by = _scales(
            scales, nested, offsets, tables, row, inside, group, groups, rows_total, first, second, SCALE, SHARED
        )  # fmt: skip
        value *= by[:, None]
        tl.store(out + row.to(tl.int64)[:, None] * inner + k[None, :], value.to(kind), there)


def dequantize(w: QuantMatrix, out: torch.Tensor) -> torch.Tensor:
    """The matrix in `out`'s type, in the first elements of the flat buffer `out`; returned as [outputs, inputs]."""
    rows, inner = w.shape
    found = out[: rows * inner].view(rows, inner)
    block_n = 32
    _dequantize[(-(-rows // block_n), -(-inner // 256))](
        w.codes.view(torch.int8), *w.given(w.codes), found, rows, inner, *w.parts,
        KIND=w.kind, SCALE=w.scaling, GROUP=w.group, SHARED=w.shared, ASYM=w.zeros is not None,
        BYTES=w.chunk_bytes, BLOCK_N=block_n, BLOCK_K=256, FAST=out.dtype == torch.bfloat16 and out.is_cuda, num_warps=4,
    )  # fmt: skip
    return found
