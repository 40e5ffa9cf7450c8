"""FP8 E4M3: sign, 4 bits of exponent, 3 of mantissa, largest value 448; the error is relative, at most 1/16 of a value.

The scale brings the largest value of a tensor, a row or a tile of 128 x 128 to 448. Activations stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from headrace.base.units import ceil_div
from headrace.engine.quant.formats._contract import Format, Layout, Packed, Tensors
from headrace.engine.quant.formats._lookup import there

LARGEST = 448.0
_NAN = 0x7F
_TABLE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The value of each byte: a look-up is faster than the conversion."""


class Float8(Format):
    def layout(self, rows: int, columns: int) -> Layout:
        match self.spec.scaling:
            case "tensor":
                scales: tuple[int, ...] = (1,)
            case "row":
                scales = (rows,)
            case _:
                tile = self.spec.group_size
                scales = (ceil_div(rows, tile), ceil_div(columns, tile))
        return {"codes": (torch.float8_e4m3fn, (rows, columns)), "scales": (torch.float32, scales)}

    def encode(self, weight: torch.Tensor) -> Tensors:
        largest = weight.abs()
        match self.spec.scaling:
            case "tensor":
                largest = largest.amax().view(1)
            case "row":
                largest = largest.amax(1)
            case _:
                tile = self.spec.group_size
                rows, columns = weight.shape
                largest = F.pad(largest, (0, -columns % tile, 0, -rows % tile))
                largest = largest.view(ceil_div(rows, tile), tile, -1, tile).amax((1, 3))
        scales = self.usable(largest / LARGEST, torch.float32)
        codes = (weight / self._spread(scales, *weight.shape)).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return {"codes": codes, "scales": scales}

    def decode(self, tensors: Tensors, rows: int, columns: int) -> torch.Tensor:
        codes = tensors["codes"]
        values = there(_TABLE, codes.device).index_select(0, codes.view(torch.uint8).view(-1).int())
        return values.view(rows, columns).mul_(self._spread(tensors["scales"], rows, columns))

    def _spread(self, scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """The scales in a shape that broadcasts over the matrix."""
        match self.spec.scaling:
            case "tensor":
                return scales
            case "row":
                return scales[:, None]
            case _:
                tile = self.spec.group_size
                return scales.repeat_interleave(tile, 0)[:rows].repeat_interleave(tile, 1)[:, :columns]

    def damage(self, tensors: Tensors, columns: int) -> str | None:
        if bool(((tensors["codes"].view(torch.uint8) & _NAN) == _NAN).any()):
            return "its values hold NaN"
        return super().damage(tensors, columns)

    def split(self, packed: Packed, sizes: Sequence[int], name: str) -> list[Packed]:
        codes, scales = packed.tensors["codes"].split(list(sizes)), packed.tensors["scales"]
        tile = self.spec.group_size
        if self.spec.scaling == "tensor":
            parts = [scales] * len(sizes)
        elif self.spec.scaling == "row":
            parts = list(scales.split(list(sizes)))
        elif all(n % tile == 0 for n in sizes[:-1]):
            parts = list(scales.split([ceil_div(n, tile) for n in sizes]))
        else:
            return super().split(packed, sizes, name)
        columns = packed.shape[-1]
        return [
            Packed(self, (n, columns), {"codes": c, "scales": s}) for n, c, s in zip(sizes, codes, parts, strict=True)
        ]


FORMATS = (Float8("fp8_e4m3"), Float8("fp8_channel"), Float8("fp8_block128"))
