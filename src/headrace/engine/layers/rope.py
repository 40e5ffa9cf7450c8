"""Rotary position embedding as one complex product.

All models are brought to one order of dimensions when their weights are loaded: rotary pairs are neighbours (2i, 2i + 1).
A permutation of a head's dimensions that is the same for queries and keys leaves every attention score as it is, and the
rotation becomes a product with exp(i * position * frequency).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from headrace.engine.attention._contract import Layer
from headrace.engine.frequencies import frequencies
from headrace.engine.layers.direct import native_call
from headrace.spec.model import Rope

_FEW = 64
"""Tokens up to which one native call, which runs in the caller's thread, rotates and stores."""


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


class HeadBuffer:
    """Where a step's projections are rotated to, layer after layer: queries, keys and values of all heads side by side.

    One complex product per layer rotates everything (values by 1) and moves it here, where the views that attention and the
    cache need are made once per step. `rotation` [tokens, dim / 2] is what a token's position asks for, None without rope.
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int, rotation: torch.Tensor | None, like: torch.Tensor):
        """`like` [tokens, …] gives the number of tokens, type and device."""
        every = heads + 2 * kv_heads
        self._flat = like.new_empty(like.shape[0], every * head_dim)
        self._pairs = self._flat.view(torch.complex64) if like.dtype == torch.float32 else None
        self._factors = None
        if rotation is not None:
            factors = rotation.new_ones(like.shape[0], every, head_dim // 2)
            self._turned = factors[:, : heads + kv_heads, : rotation.shape[-1]]
            self._factors = factors.flatten(1)
            self.turn(rotation)
        self.q, self.k, self.v = self._flat.view(-1, every, head_dim).split((heads, kv_heads, kv_heads), 1)
        self.kv = self._flat[:, heads * head_dim :]
        self._direct = None
        if (
            self._pairs is not None
            and self._factors is not None
            and like.shape[0] <= _FEW
            and like.device.type == "cpu"
        ):
            self._direct = native_call("rotate_and_store")
            width = self._flat.shape[1]
            start = heads * head_dim
            self._addresses = (self._factors.data_ptr(), self._flat.data_ptr(), like.shape[0], width, start)

    def turn(self, rotation: torch.Tensor | None) -> None:
        """Go on to as many tokens at other positions."""
        if rotation is not None:
            self._turned.copy_(rotation.unsqueeze(1))

    def fill_and_store(self, projected: torch.Tensor, cache: Layer, slots: torch.Tensor) -> None:
        """Take over `projected` [tokens, (heads + 2 * kv_heads) * head_dim], rotated, and write keys and values to the cache."""
        address = getattr(cache, "address", None)
        if self._direct is not None and address is not None and projected.is_contiguous():
            self._direct(projected.data_ptr(), *self._addresses, address, slots.data_ptr())
            return
        self.fill(projected)
        cache.write(slots, self.kv)

    def fill(self, projected: torch.Tensor) -> None:
        """Take over `projected` [tokens, (heads + 2 * kv_heads) * head_dim], rotated."""
        if self._factors is None:
            self._flat.copy_(projected)
        elif self._pairs is not None:
            torch.mul(projected.view(torch.complex64), self._factors, out=self._pairs)
        else:
            wide = projected.float().view(torch.complex64).mul_(self._factors)
            self._flat.copy_(wide.view(torch.float32))
