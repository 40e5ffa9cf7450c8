"""Two 4-bit codes in a byte."""

from __future__ import annotations

import torch


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [rows, n] below 16 → bytes [rows, ceil(n / 2)]: an even column is the low half."""
    if codes.shape[-1] % 2:
        codes = torch.cat([codes, codes.new_zeros(*codes.shape[:-1], 1)], -1)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` codes of each row, uint8."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., :count]
