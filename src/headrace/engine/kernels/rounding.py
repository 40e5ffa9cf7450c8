"""Rows rounded to 8 bits: what a kernel that has a whole row at hand leaves for a product of such codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows as codes [rows, width], contiguous int8 or E4M3, times scales [rows] fp32; zeros have scale 1."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __len__(self) -> int:
        return len(self.codes)

    def flags(self) -> dict[str, float | bool]:
        return {"LARGEST": LARGEST[self.codes.dtype], "WHOLE": self.codes.dtype == torch.int8}


@triton.jit
def to_eight_bits(values, LARGEST: tl.constexpr, WHOLE: tl.constexpr):
    """fp32 values of one row divided by the scale that is returned with them, rounded to integers if `WHOLE`."""
    most = tl.max(tl.abs(values), 0)
    scale = tl.where(most > 0, most / LARGEST, 1.0)
    values = values / scale
    if WHOLE:
        # 1.5 · 2^23 leaves no bits for fractions: the sum is rounded to the nearest even whole number.
        values = (values + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(values, -LARGEST), LARGEST), scale
