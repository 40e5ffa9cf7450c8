"""FP8 E4M3: one byte per number, cast as it is; no scale, since keys and values of trained models lie far inside ±448."""

from __future__ import annotations

import torch

from headrace.engine.backend import Limits
from headrace.engine.kv_formats._coded import CodedPool, spread
from headrace.spec.cache import CacheLayout

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
"""What is larger is stored as this: the type has no infinity, and a cast would make it NaN."""


class FP8Pool(CodedPool):
    """`codes` [block_tokens, 2 * kv_heads, head_dim] per layer of a block."""

    def __init__(
        self, layout: CacheLayout, limits: Limits, dtype: torch.dtype, device: torch.device, num_layers: int
    ) -> None:
        shape = (layout.block_tokens, 2 * layout.num_kv_heads, layout.head_dim)
        super().__init__(layout, limits.num_blocks, {"codes": (shape, torch.uint8)})

    @staticmethod
    def cleaned(field: torch.Tensor) -> torch.Tensor:
        return field.masked_fill(field & 0x7F == 0x7F, 0)  # NaN of either sign

    def layer(self, layer: int, slot: int, group: int) -> FP8Layer:
        return FP8Layer(self.fields["codes"][slot])


class FP8Layer:
    """One layer's keys and values; see `headrace.engine.attention.naive.ReadableLayer`."""

    def __init__(self, codes: torch.Tensor) -> None:
        self.num_kv_heads = codes.shape[2] // 2
        self._codes = codes
        self._tokens = codes.flatten(0, 1)

    def write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        stored = kv.clamp(-LARGEST, LARGEST).to(FP8)
        self._tokens.index_copy_(0, slots, stored.view(torch.uint8).reshape(-1, *self._tokens.shape[1:]))
        kv.copy_(stored)

    def gather(self, blocks: torch.Tensor, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return spread(self._codes.index_select(0, blocks).view(FP8).to(dtype), rows, self.num_kv_heads)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        return self._tokens[slots].view(FP8).float()


FORMAT = FP8Pool
