"""Rotary position embedding as one complex product.

All models are brought to one order of dimensions when their weights are loaded: rotary pairs are neighbours (2i, 2i + 1).
A permutation of a head's dimensions that is the same for queries and keys leaves every attention score as it is, and the
rotation becomes a product with exp(i * position * frequency).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from headrace.engine.frequencies import frequencies
from headrace.spec.model import Rope


def rotation_table(rope: Rope, max_model_len: int, device: torch.device) -> torch.Tensor:
    """exp(i * position * frequency) for every position, complex64 [max_model_len, dim / 2], the magnitude folded in."""
    radians, magnitude = frequencies(rope, max_model_len)
    angles = np.arange(max_model_len, dtype=np.float32)[:, None] * radians[None, :]
    table = torch.polar(torch.full(angles.shape, magnitude, dtype=torch.float32), torch.from_numpy(angles))
    return table.to(device)


def neighbour_order(head_dim: int, rope: Rope | None) -> npt.NDArray[np.int64]:
    """Where each dimension of a head comes from so that rotary pairs become neighbours; dimensions past `rope.dim` stay."""
    order = np.arange(head_dim)
    if rope is not None and not rope.interleaved:
        half = rope.dim // 2
        order[0 : rope.dim : 2] = np.arange(half)
        order[1 : rope.dim : 2] = np.arange(half) + half
    return order


def rotate(heads: torch.Tensor, rotation: torch.Tensor, dim: int) -> None:
    """Rotate the first `dim` dimensions of `heads` [tokens, heads, head_dim] in place by `rotation` [tokens, 1, dim / 2]."""
    part = heads if dim == heads.shape[-1] else heads[..., :dim]
    pairs = part.unflatten(-1, (dim // 2, 2))
    if heads.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotation)
    else:
        wide = torch.view_as_complex(pairs.float().contiguous()).mul_(rotation)
        pairs.copy_(torch.view_as_real(wide))
