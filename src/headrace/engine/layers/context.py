"""What one step knows, handed to every layer: no layer reads anything global."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.engine.attention._contract import AttentionBackend, LayerCache


@dataclass(slots=True)
class StepContext:
    """Tensors of one step, for `num_tokens` rows.

    `token_ids` [tokens] is numpy, since embeddings may be read from a mapped file. `rotations[r]` [tokens, 1, dim / 2]
    belongs to the r-th distinct rope of the model. `caches[layer]` is the layer's part of the KV pool, `write_slots[g]`
    [tokens] the token slots of cache group g to write, `prepared[layer]` what the attention backend made for this step.
    """

    token_ids: np.ndarray
    rotations: Sequence[torch.Tensor]
    caches: Sequence[LayerCache]
    group_of: Sequence[int]
    write_slots: Sequence[torch.Tensor]
    prepared: Sequence[Any]
    attention: AttentionBackend

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Write the step's keys and values, then attend: q [tokens, heads, dim] → [tokens, heads * dim].

        `kv` [tokens, 2 * kv_heads * dim] is k and v in one view.
        """
        cache = self.caches[layer]
        cache.write(self.write_slots[self.group_of[layer]], kv)
        return self.attention.attend(q, k, v, cache, self.prepared[layer])
