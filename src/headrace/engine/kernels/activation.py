"""act(gate) * up of gated MLPs, and plain activations, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.engine.kernels.launchers import power_of_2
from headrace.engine.kernels.rounding import Rounded, to_eight_bits

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def act(x, KIND: tl.constexpr):
    """One of `ACTIVATIONS` in fp32."""
    if KIND == 0:
        return x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == 3:
        return tl.maximum(x, 0.0)
    else:
        positive = tl.maximum(x, 0.0)
        return positive * positive


@triton.jit
def _activate(
    both, out, width, in_stride, out_stride, KIND: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    value = act(tl.load(both + row * in_stride + at, inside, 0.0).to(tl.float32), KIND)
    if GATED:
        value *= tl.load(both + row * in_stride + width + at, inside, 0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, value.to(out.dtype.element_ty), inside)


def activate(both: torch.Tensor, out: torch.Tensor, kind: str, *, gated: bool, pdl: bool = False) -> None:
    """out = act(gate) * up with both = [gate | up] [tokens, 2 * width] if `gated`, else act(both)."""
    tokens, width = out.shape
    block = min(2048, power_of_2(width))
    _activate[(tokens, -(-width // block))](
        both, out, width, both.stride(0), out.stride(0), KIND=ACTIVATIONS[kind], GATED=gated, PDL=pdl,
        BLOCK=block, num_warps=max(1, block // 512), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit
def _activate_rounded(
    both, codes, scales, width, in_stride, KIND: tl.constexpr, GATED: tl.constexpr, LARGEST: tl.constexpr,
    WHOLE: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = act(tl.load(both + row * in_stride + at, inside, 0.0).to(tl.float32), KIND)
    if GATED:
        value *= tl.load(both + row * in_stride + width + at, inside, 0.0).to(tl.float32)
    value = tl.where(inside, value, 0.0).to(both.dtype.element_ty).to(tl.float32)
    code, by = to_eight_bits(value, LARGEST, WHOLE)
    tl.store(codes + row * width + at, code.to(codes.dtype.element_ty), inside)
    tl.store(scales + row, by)


def activate_rounded(both: torch.Tensor, rounded: Rounded, kind: str, *, gated: bool, pdl: bool = False) -> None:
    """Codes of what `activate` would give in the type of `both`."""
    tokens, width = rounded.codes.shape
    block = power_of_2(width)
    _activate_rounded[(tokens,)](
        both, rounded.codes, rounded.scales, width, both.stride(0), KIND=ACTIVATIONS[kind], GATED=gated,
        **rounded.flags(), PDL=pdl, BLOCK=block, num_warps=max(1, min(16, block // 1024)),
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
