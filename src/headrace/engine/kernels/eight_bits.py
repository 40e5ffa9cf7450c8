"""Activations rounded to 8 bits per token, and the scales of products of such codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.engine.kernels.launchers import power_of_2
from headrace.engine.kernels.quantized import part_of
from headrace.engine.kernels.rounding import LARGEST, to_eight_bits


@triton.jit
def _round_rows(
    x, codes, scales, width, x_stride, LARGEST: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * x_stride + at, inside, 0.0).to(tl.float32)
    values, scale = to_eight_bits(values, LARGEST, WHOLE)
    tl.store(codes + row * width + at, values.to(codes.dtype.element_ty), inside)
    tl.store(scales + row, scale)


def round_rows(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, pdl: bool = False) -> None:
    """codes [rows, width] int8 or E4M3 and scales [rows] fp32 such that codes · scales is nearest to x; zeros have scale 1."""
    rows, width = x.shape
    block = power_of_2(width)
    _round_rows[(rows,)](
        x, codes, scales, width, x.stride(0), LARGEST=LARGEST[codes.dtype], WHOLE=codes.dtype == torch.int8, PDL=pdl,
        BLOCK=block, num_warps=max(1, min(16, block // 1024)), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "second"])
def _rescale(
    sums, out, rows_by, columns_by, bias, width, first, second,
    BY_PART: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < width
    by = tl.load(rows_by + row)
    index = part_of(n, first, second) if BY_PART else n
    value = tl.load(sums + row * width + n, inside, 0).to(tl.float32) * by
    value *= tl.load(columns_by + index, inside, 0.0)
    if BIAS:
        value += tl.load(bias + n, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + n, value.to(out.dtype.element_ty), inside)


def rescale(
    sums: torch.Tensor,
    out: torch.Tensor,
    rows_by: torch.Tensor,
    columns_by: torch.Tensor,
    bias: torch.Tensor | None,
    parts: tuple[int, int],
    *,
    pdl: bool = False,
) -> None:
    """out = sums · rows_by [rows, 1] · columns_by [width] + bias; out may be sums. Of fewer `columns_by` than columns each
    stands for a part; the second and third part begin at `parts`."""
    rows, width = out.shape
    block = min(2048, power_of_2(width))
    _rescale[(rows, -(-width // block))](
        sums, out, rows_by, columns_by, out if bias is None else bias, width, *parts,
        BY_PART=len(columns_by) < width, BIAS=bias is not None, PDL=pdl, BLOCK=block, num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
