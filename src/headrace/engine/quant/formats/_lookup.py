"""Values of codes by table: one look-up gives the two fp32 values of a byte of 4-bit codes."""

from __future__ import annotations

from functools import cache

import torch


def pair_table(values: torch.Tensor, *, high_first: bool) -> torch.Tensor:
    """For each byte the values of its two codes, as one 64-bit element [256]; `values` [16] in fp32."""
    byte = torch.arange(256)
    halves = (byte >> 4, byte & 15) if high_first else (byte & 15, byte >> 4)
    return values.float()[torch.stack(halves, 1)].contiguous().view(torch.float64).view(-1)


@cache
def there(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A constant table on a device, copied once: a step that is being captured may not copy from the host."""
    return table.to(device)


def pairs(table: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """fp32 values [..., 2 n] of bytes [..., n]."""
    found = there(table, packed.device).index_select(0, packed.reshape(-1).int()).view(torch.float32)
    return found.view(*packed.shape[:-1], -1)
