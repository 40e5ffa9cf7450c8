"""A pool of codes and their scales: several tensors, each with all layers and blocks in its first two dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch

from headrace.engine.attention._contract import AttentionBackend
from headrace.engine.batch import Batch
from headrace.engine.kv_formats._plain import zeros
from headrace.spec.cache import CacheLayout


class CodedPool:
    """`fields`: name to the shape of one layer of one block, and the type.

    All of it is zero at first, and of what a failed sequence wrote whatever is no finite number is made zero: so every code
    and scale is one, whoever left it.
    """

    attention: ClassVar[AttentionBackend | None] = None
    staging_bytes = 0
    dtype = torch.uint8

    def __init__(
        self, layout: CacheLayout, num_blocks: int, fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        self.fields = {
            name: zeros((layout.layers_per_group, num_blocks, *shape), dtype) for name, (shape, dtype) in fields.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(field.nbytes for field in self.fields.values())

    def begin(self, batch: Batch) -> None:
        """Nothing to prepare."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        taken, to = torch.tensor(sources), torch.tensor(targets)
        for field in self.fields.values():
            field.index_copy_(1, to, field.index_select(1, taken))

    def zero(self, token_slots: np.ndarray) -> None:
        """Nothing to do: what lies there is finite."""

    def discard(self, blocks: Sequence[int]) -> None:
        # Some of the blocks may be shared with sequences that are well: what is finite must stay as it is.
        chosen = torch.tensor(blocks, dtype=torch.int64)
        for field in self.fields.values():
            field.index_copy_(1, chosen, self.cleaned(field.index_select(1, chosen)))

    @staticmethod
    def cleaned(field: torch.Tensor) -> torch.Tensor:
        """A copy with zeros for what is not finite."""
        return field.nan_to_num(0, 0, 0) if field.is_floating_point() else field


def spread(found: torch.Tensor, rows: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows * blocks, block_tokens, 2 * kv_heads, dim] of gathered blocks as keys and values [rows, kv_heads, tokens, dim]."""
    found = found.view(rows, -1, 2 * kv_heads, found.shape[-1]).transpose(1, 2)
    return found[:, :kv_heads], found[:, kv_heads:]
