"""MXFP4 (OCP Microscaling 1.0): E2M1 values ±{0, 0.5, 1, 1.5, 2, 3, 4, 6} with one power of two per 32 inputs.

The scale is an E8M0 byte, 2^(byte - 127); 255 is NaN. Of a group it is the exponent of the largest value less 2, the largest
exponent of E2M1, so values between 6 and 8 times the scale are cut to 6.
"""

from __future__ import annotations

import torch

from headrace.base.units import ceil_div
from headrace.engine.quant.formats._contract import Layout, RowFormat, Tensors
from headrace.engine.quant.formats._groups import flattened, grouped
from headrace.engine.quant.formats._lookup import pair_table, pairs
from headrace.engine.quant.formats._nibbles import pack

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_TOP_EXPONENT = 2
_NAN = 255
_TABLE = pair_table(torch.tensor([*VALUES, *(-v for v in VALUES)]), high_first=False)


class MXFP4(RowFormat):
    def layout(self, rows: int, columns: int) -> Layout:
        return {
            "codes": (torch.uint8, (rows, ceil_div(columns, 2))),
            "scales": (torch.uint8, (rows, ceil_div(columns, self.spec.group_size))),
        }

    def encode(self, weight: torch.Tensor) -> Tensors:
        groups = grouped(weight, self.spec.group_size)
        largest = groups.abs().amax(-1)
        # frexp gives a mantissa in [0.5, 1): the exponent of the value is one less.
        exponents = torch.frexp(largest).exponent - 1 - _TOP_EXPONENT
        scales = (exponents + _BIAS).clamp_(0, _NAN - 1)
        scales[largest == 0] = 0
        values = torch.ldexp(groups, (_BIAS - scales)[..., None])
        codes = nearest(values.abs()) | torch.signbit(values).to(torch.uint8) << 3
        return {"codes": pack(flattened(codes, weight.shape[1])), "scales": scales.to(torch.uint8)}

    def decode(self, tensors: Tensors, rows: int, columns: int) -> torch.Tensor:
        values = pairs(_TABLE, tensors["codes"])[:, :columns]
        exponents = tensors["scales"].to(torch.int32) - _BIAS
        scales = torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents)
        return flattened(grouped(values, self.spec.group_size) * scales[..., None], columns).contiguous()

    def damage(self, tensors: Tensors, columns: int) -> str | None:
        return "its scales hold NaN" if bool((tensors["scales"] == _NAN).any()) else None


def nearest(values: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest of `VALUES` to magnitudes; halfway goes to the even code, above 6 to 6."""
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for code in range(1, len(VALUES)):
        edge = (VALUES[code - 1] + VALUES[code]) / 2
        codes += (values >= edge) if code % 2 == 0 else (values > edge)
    return codes


FORMATS = (MXFP4("mxfp4"),)
