"""Keys and values as they are, in a floating-point type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from headrace.engine.attention._contract import AttentionBackend, LayerCache
from headrace.engine.backend import Limits
from headrace.engine.batch import Batch
from headrace.engine.memory import huge_pages
from headrace.spec.cache import CacheLayout

PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class PlainPool:
    """The KV cache: `kv` [layers_per_group, blocks, block_tokens, 2 * kv_heads, head_dim], key heads before value heads.

    Block b of a group holds, at index s of the first dimension, the group's s-th layer (`CacheLayout.place`). Memory is
    not initialized: nothing is read that was not written, and tails of blocks are zeroed when they are begun.
    """

    attention: ClassVar[AttentionBackend | None] = None
    staging_bytes = 0

    def __init__(
        self, layout: CacheLayout, limits: Limits, dtype: torch.dtype, device: torch.device, num_layers: int
    ) -> None:
        self.dtype = PLAIN[layout.kv_precision]
        shape = (
            layout.layers_per_group,
            limits.num_blocks,
            layout.block_tokens,
            2 * layout.num_kv_heads,
            layout.head_dim,
        )
        self.kv = (
            zeros(shape, self.dtype) if device.type == "cpu" else torch.empty(shape, dtype=self.dtype, device=device)
        )
        self._tokens = self.kv.flatten(1, 2)

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    def layer(self, layer: int, slot: int, group: int) -> LayerCache:
        return LayerCache(self.kv[slot])

    def begin(self, batch: Batch) -> None:
        """Nothing to prepare."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        to = self.kv.device
        found = self.kv.index_select(1, torch.tensor(sources, device=to))
        self.kv.index_copy_(1, torch.tensor(targets, device=to), found)

    def zero(self, token_slots: np.ndarray) -> None:
        self._tokens.index_fill_(1, torch.from_numpy(token_slots).to(self.kv.device), 0)

    def discard(self, blocks: Sequence[int]) -> None:
        """Nothing to do: a block's next owner overwrites it or has its tail zeroed before it is read."""


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU in pages that the kernel fills when they are first touched, huge ones where it has them."""
    count = math.prod(shape)
    return torch.frombuffer(huge_pages(count * dtype.itemsize), dtype=dtype, count=count).view(tuple(shape))
