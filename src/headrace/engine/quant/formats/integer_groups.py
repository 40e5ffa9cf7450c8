"""INT4 and INT8 in groups of inputs: a scale per group, and with `asym` a zero point, value = scale · (code - zero).

Codes are unsigned. Without zero points the zero is in the middle (8 or 128), so that one code more is negative than positive.
Names ending in `act` also hold the order of inputs: their groups are of inputs that GPTQ quantized together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.base.units import ceil_div
from headrace.engine.quant.formats._contract import Format, Layout, Packed, Tensors
from headrace.engine.quant.formats._groups import flattened, grouped
from headrace.engine.quant.formats._nibbles import pack, unpack
from headrace.spec.precision import PRECISIONS

SIZES = (32, 64, 128)


class IntegerGroups(Format):
    def __init__(self, name: str, stored: str | None = None, scales: torch.dtype | None = None) -> None:
        super().__init__(name, stored, scales)
        self.bits = int(self.spec.bits)
        self.levels = 1 << self.bits
        self.middle = self.levels // 2
        self.asymmetric = self.spec.zero_bits > 0
        self.ordered = self.spec.column_bytes > 0
        # One group per row keeps an fp32 scale, as `headrace.spec.precision` has it.
        self.scale_dtype = torch.float32 if self.spec.scaling == "row" else torch.float16

    def size(self, columns: int) -> int:
        """Inputs per group of a row of so many."""
        return columns if self.spec.scaling == "row" else self.spec.group_size

    def layout(self, rows: int, columns: int) -> Layout:
        groups = ceil_div(columns, self.size(columns))
        found: Layout = {
            "codes": (torch.uint8, (rows, ceil_div(columns * self.bits, 8))),
            "scales": (self.scale_dtype, (rows, groups)),
        }
        if self.asymmetric:
            found["zeros"] = (torch.uint8, (ceil_div(rows * groups * self.bits, 8),))
        if self.ordered:
            found["order"] = (torch.int32, (columns,))
        return found

    def encode(self, weight: torch.Tensor) -> Tensors:
        columns = weight.shape[1]
        groups = grouped(weight, self.size(columns))
        scales, zeros = self.grid(groups)
        codes = self.codes(groups, scales, zeros)
        order = torch.arange(columns, dtype=torch.int32, device=weight.device) if self.ordered else None
        return self.tensors(flattened(codes, columns), scales, zeros, order)

    def grid(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale (rounded as it is stored, in fp32) and zero point of each group [..., size] → two tensors [...]."""
        if self.asymmetric:
            low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
            scales = self.usable((high - low) / (self.levels - 1), self.scale_dtype)
            return scales, (-low / scales).round_().clamp_(0, self.levels - 1)
        scales = self.usable(groups.abs().amax(-1) / (self.middle - 0.5), self.scale_dtype)
        return scales, torch.full_like(scales, self.middle)

    def codes(self, groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        """The nearest codes, uint8, of values [..., size] on the grid of each group."""
        values = (groups / scales[..., None]).round_().add_(zeros[..., None])
        return values.clamp_(0, self.levels - 1).nan_to_num_(0).to(torch.uint8)

    def tensors(
        self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, order: torch.Tensor | None
    ) -> Tensors:
        """The format's tensors of codes [rows, columns] on a grid [rows, groups]; `order`: input of each column."""
        found = {
            "codes": pack(codes) if self.bits == 4 else codes.contiguous(),
            "scales": scales.to(self.scale_dtype).contiguous(),
        }
        if self.asymmetric:
            flat = zeros.to(torch.uint8).flatten()
            found["zeros"] = pack(flat[None])[0] if self.bits == 4 else flat
        if self.ordered:
            assert order is not None
            found["order"] = order.to(torch.int32)
        return found

    def decode(self, tensors: Tensors, rows: int, columns: int) -> torch.Tensor:
        values = flattened(self._decoded(tensors, rows, columns), columns)
        if not self.ordered:
            return values.contiguous()
        out = torch.empty_like(values)
        out[:, tensors["order"].long()] = values
        return out

    def _decoded(self, tensors: Tensors, rows: int, columns: int) -> torch.Tensor:
        size = self.size(columns)
        codes = unpack(tensors["codes"], columns) if self.bits == 4 else tensors["codes"]
        values = grouped(codes.float(), size)
        scales = tensors["scales"].float()
        if self.asymmetric:
            zeros = tensors["zeros"]
            zeros = unpack(zeros[None], scales.numel())[0] if self.bits == 4 else zeros
            values.sub_(zeros.view(scales.shape)[..., None].float())
        else:
            values.sub_(self.middle)
        return values.mul_(scales[..., None])

    def damage(self, tensors: Tensors, columns: int) -> str | None:
        if self.ordered:
            order = tensors["order"].long().sort().values
            if not torch.equal(order, torch.arange(columns, device=order.device)):
                return "the order of its inputs is not a permutation"
        return super().damage(tensors, columns)

    def split(self, packed: Packed, sizes: Sequence[int], name: str) -> list[Packed]:
        rows, columns = packed.shape
        groups = packed.tensors["scales"].shape[1]
        codes, scales = packed.tensors["codes"].split(list(sizes)), packed.tensors["scales"].split(list(sizes))
        parts: list[dict[str, torch.Tensor]] = [{"codes": c, "scales": s} for c, s in zip(codes, scales, strict=True)]
        if self.asymmetric:
            zeros = packed.tensors["zeros"]
            flat = unpack(zeros[None], rows * groups)[0] if self.bits == 4 else zeros
            for part, cut in zip(parts, flat.split([n * groups for n in sizes]), strict=True):
                part["zeros"] = pack(cut[None])[0] if self.bits == 4 else cut
        if self.ordered:
            for part in parts:
                part["order"] = packed.tensors["order"]
        return [Packed(self, (n, columns), part) for n, part in zip(sizes, parts, strict=True)]


FORMATS = (
    IntegerGroups("int4"),
    *(
        IntegerGroups(name)
        for bits in (4, 8)
        for size in SIZES
        for ending in ("", "_asym", "_act", "_asym_act")
        if (name := f"int{bits}_g{size}{ending}") in PRECISIONS
    ),
)
