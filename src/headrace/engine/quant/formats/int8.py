"""INT8 weights with one fp32 scale per output: symmetric, value = scale · code, |code| ≤ 127.

`int8` multiplies activations as they are (W8A16). `w8a8` rounds each token's activations to INT8 too, with a scale of its
own, and multiplies integers: the sum is exact, so all of the loss is in the two roundings.
"""

from __future__ import annotations

import torch

from headrace.engine.quant.formats._contract import Layout, Packed, RowFormat, Tensors


class Int8(RowFormat):
    def layout(self, rows: int, columns: int) -> Layout:
        return {"codes": (torch.int8, (rows, columns)), "scales": (torch.float32, (rows,))}

    def encode(self, weight: torch.Tensor) -> Tensors:
        scales = self.usable(weight.abs().amax(1) / 127, torch.float32)
        codes = (weight / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return {"codes": codes, "scales": scales}

    def decode(self, tensors: Tensors, rows: int, columns: int) -> torch.Tensor:
        return tensors["codes"].float().mul_(tensors["scales"][:, None])

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        # The scale is the output's, so it multiplies the product: one pass less over the matrix.
        codes = packed.tensors["codes"].to(x.dtype)
        return (x @ codes.t()).float().mul_(packed.tensors["scales"]).to(x.dtype)


class Int8Both(Int8):
    quantizes_activations = True

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        codes, scales = to_int8(x.float())
        sums = torch._int_mm(codes, packed.tensors["codes"].t())
        return sums.float().mul_(scales[:, None]).mul_(packed.tensors["scales"]).to(x.dtype)


def to_int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes and one fp32 scale per row; a row of zeros has scale 1."""
    scales = values.abs().amax(1) / 127
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (values / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


FORMATS = (Int8("int8"), Int8Both("w8a8", stored="int8"))
