"""RMS normalization with everything beside it that touches the residual stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.engine.kernels.launchers import power_of_2
from headrace.engine.kernels.rounding import Rounded, to_eight_bits

FEW_ROWS = 512
"""Up to so many rows one is the work of more threads."""


@triton.jit
def _add_norm(
    x, y, post_weight, weight, out, bad, codes, scales, width, x_stride, y_stride, part_stride, out_stride, eps, scale,
    HAS_Y: tl.constexpr, PARTS: tl.constexpr, HAS_POST: tl.constexpr, HAS_OUT: tl.constexpr, CHECK: tl.constexpr,
    CODED: tl.constexpr, LARGEST: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    if HAS_OUT:
        # Constant, so it is under way before the kernel before this one has ended.
        gain = tl.load(weight + at, inside, 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + row * x_stride + at, inside, 0.0).to(tl.float32)
    if HAS_Y:
        added = tl.load(y + row * y_stride + at, inside, 0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            added += tl.load(y + part * part_stride + row * y_stride + at, inside, 0.0).to(tl.float32)
        if HAS_POST:
            shrink = tl.rsqrt(tl.sum(added * added, 0) / width + eps)
            added = added * shrink * tl.load(post_weight + at, inside, 0.0).to(tl.float32)
        rounded = (values + added * scale).to(x.dtype.element_ty)
        tl.store(x + row * x_stride + at, rounded, inside)
        values = rounded.to(tl.float32)
    if HAS_OUT:
        squares = tl.sum(values * values, 0)
        normed = values * tl.rsqrt(squares / width + eps) * gain.to(tl.float32)
        normed = normed.to(out.dtype.element_ty)
        if CODED:
            code, by = to_eight_bits(normed.to(tl.float32), LARGEST, WHOLE)
            tl.store(codes + row * width + at, code.to(codes.dtype.element_ty), inside)
            tl.store(scales + row, by)
        else:
            tl.store(out + row * out_stride + at, normed, inside)
    if CHECK:
        # The sum of a row is finite exactly if every entry is.
        total = tl.sum(values, 0)
        tl.store(bad + row, (tl.abs(total) < float("inf")).to(tl.int32) == 0)


def add_norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor | None,
    out: torch.Tensor | None,
    eps: float,
    *,
    post_weight: torch.Tensor | None = None,
    scale: float = 1.0,
    bad: torch.Tensor | None = None,
    rounded: Rounded | None = None,
    pdl: bool = False,
) -> None:
    """x += scale * post(y) in place, then out = x / rms(x) * weight; rows [tokens, width], contiguous in the last dimension.

    Without `y` nothing is added; of parts of it, [n, tokens, width], their sum is. `post_weight` normalizes y first (Gemma's
    second norms); without `weight` only the sum is made. `bad` [tokens] int32 gets 1 for rows that are not finite. `rounded`:
    codes of what `out` would be, which is left alone.
    """
    tokens, width = x.shape
    block = power_of_2(width)
    some = x if y is None else y
    parts = 1 if y is None or y.dim() == 2 else len(y)
    # Of few rows each has a multiprocessor for itself, or half of one: a thread then loads 16 bytes of each operand.
    warps = 16 if block >= 4096 and tokens <= FEW_ROWS else 8 if block >= 4096 else 4 if block >= 1024 else 1
    _add_norm[(tokens,)](
        x, some, x if post_weight is None else post_weight, x if weight is None else weight,
        x if out is None else out, x if bad is None else bad, x if rounded is None else rounded.codes,
        x if rounded is None else rounded.scales, width,
        x.stride(0), some.stride(-2), some.stride(0), 0 if out is None else out.stride(0), eps, scale,
        HAS_Y=y is not None, PARTS=parts, HAS_POST=post_weight is not None, HAS_OUT=weight is not None,
        CHECK=bad is not None, CODED=rounded is not None, **({"LARGEST": 0.0, "WHOLE": False} if rounded is None else rounded.flags()),
        PDL=pdl, BLOCK=block, num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
