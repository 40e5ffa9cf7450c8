"""INT8: each vector of a token and head has a scale, its largest magnitude over 127, kept in fp16."""

from __future__ import annotations

import torch

from headrace.engine.backend import Limits
from headrace.engine.kv_formats._coded import CodedPool, spread
from headrace.spec.cache import CacheLayout


class Int8Pool(CodedPool):
    """Per layer of a block `codes` [block_tokens, 2 * kv_heads, head_dim] and `scales` [block_tokens, 2 * kv_heads]."""

    def __init__(
        self, layout: CacheLayout, limits: Limits, dtype: torch.dtype, device: torch.device, num_layers: int
    ) -> None:
        heads = (layout.block_tokens, 2 * layout.num_kv_heads)
        fields = {"codes": ((*heads, layout.head_dim), torch.int8), "scales": (heads, torch.float16)}
        super().__init__(layout, limits.num_blocks, fields)

    def layer(self, layer: int, slot: int, group: int) -> Int8Layer:
        return Int8Layer(self.fields["codes"][slot], self.fields["scales"][slot])


class Int8Layer:
    """One layer's keys and values; see `headrace.engine.attention.naive.ReadableLayer`."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.num_kv_heads = codes.shape[2] // 2
        self._codes, self._scales = codes, scales
        self._token_codes, self._token_scales = codes.flatten(0, 1), scales.flatten(0, 1)

    def write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        vectors = kv.view(-1, *self._token_codes.shape[1:])
        codes, scales = quantized(vectors.float())
        self._token_codes.index_copy_(0, slots, codes)
        self._token_scales.index_copy_(0, slots, scales)
        vectors.copy_(dequantized(codes, scales, torch.float32))

    def gather(self, blocks: torch.Tensor, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = self._codes.index_select(0, blocks), self._scales.index_select(0, blocks)
        return spread(dequantized(codes, scales, dtype), rows, self.num_kv_heads)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        return dequantized(self._token_codes[slots], self._token_scales[slots], torch.float32)


def quantized(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and fp16 scales of fp32 vectors [..., dim]; rounded by the scale as it is stored, so that nothing is off by
    more than half of it."""
    scales = (vectors.abs().amax(-1) / 127).half()
    divisors = torch.where(scales == 0, 1.0, scales.float()).unsqueeze(-1)
    return (vectors / divisors).round_().clamp_(-127, 127).to(torch.int8), scales


def dequantized(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Vectors [..., dim] again."""
    return codes.to(dtype).mul_(scales.unsqueeze(-1).to(dtype))


FORMAT = Int8Pool
