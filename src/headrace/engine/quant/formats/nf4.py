"""NF4: 16 quantiles of a normal distribution, scaled to the largest magnitude of each 64 elements of the flattened matrix.

With double quantization (`nf4`) the scales themselves, less their mean, are 8-bit codes of a dynamic table with one fp32 per
256 of them (QLoRA, arXiv:2305.14314): 4.127 bits per element instead of 4.5 (`nf4_single`). The layout is bitsandbytes'.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.base.units import ceil_div
from headrace.engine.quant import tables
from headrace.engine.quant.formats._contract import Format, Layout, Tensors
from headrace.engine.quant.formats._lookup import pair_table, pairs, there

_TABLE = pair_table(torch.from_numpy(tables.NF4), high_first=True)
_DYNAMIC = torch.from_numpy(tables.DYNAMIC)


class NF4(Format):
    @property
    def double(self) -> bool:
        return self.spec.scale_group > 0

    def layout(self, rows: int, columns: int) -> Layout:
        blocks = ceil_div(rows * columns, self.spec.group_size)
        codes = {"codes": (torch.uint8, (ceil_div(rows * columns, 2),))}
        if not self.double:
            return {**codes, "scales": (torch.float32, (blocks,))}
        return {
            **codes,
            "scales": (torch.uint8, (blocks,)),
            "nested": (torch.float32, (ceil_div(blocks, self.spec.scale_group),)),
            "offset": (torch.float32, (1,)),
        }

    def encode(self, weight: torch.Tensor) -> Tensors:
        flat = weight.flatten()
        blocks = F.pad(flat, (0, -len(flat) % self.spec.group_size)).view(-1, self.spec.group_size)
        scales = blocks.abs().amax(1)
        inverse = torch.where(scales > 0, 1 / scales, torch.zeros_like(scales))
        codes = _nearest(blocks * inverse[:, None], torch.from_numpy(tables.NF4)).flatten()[: len(flat)]
        if len(codes) % 2:
            codes = torch.cat([codes, codes.new_zeros(1)])
        found = {"codes": codes[0::2] << 4 | codes[1::2]}
        if not self.double:
            return {**found, "scales": scales}
        offset = scales.mean()
        centred = scales - offset
        runs = F.pad(centred, (0, -len(centred) % self.spec.scale_group)).view(-1, self.spec.scale_group)
        nested = runs.abs().amax(1)
        inverse = torch.where(nested > 0, 1 / nested, torch.zeros_like(nested))
        scale_codes = _nearest(runs * inverse[:, None], torch.from_numpy(tables.DYNAMIC)).flatten()[: len(scales)]
        return {**found, "scales": scale_codes.contiguous(), "nested": nested, "offset": offset.view(1)}

    def decode(self, tensors: Tensors, rows: int, columns: int) -> torch.Tensor:
        count, size = rows * columns, self.spec.group_size
        values = pairs(_TABLE, tensors["codes"])[:count]
        scales = self.block_scales(tensors)
        if count % size:
            values = F.pad(values, (0, -count % size))
        return (values.view(-1, size) * scales[:, None]).flatten()[:count].view(rows, columns)

    def block_scales(self, tensors: Tensors) -> torch.Tensor:
        """fp32 scale of each block."""
        if not self.double:
            return tensors["scales"]
        codes = there(_DYNAMIC, tensors["scales"].device)[tensors["scales"].int()]
        runs = tensors["nested"].repeat_interleave(self.spec.scale_group)[: len(codes)]
        return codes * runs + tensors["offset"]


def _nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """uint8 index of the nearest entry of an ascending table."""
    edges = ((table[:-1] + table[1:]) / 2).to(values.device)
    return torch.bucketize(values, edges).to(torch.uint8)


FORMATS = (NF4("nf4"), NF4("nf4_single"))
