"""What one step knows, handed to every layer: no layer reads anything global."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.engine.attention._contract import AttentionBackend, Layer
from headrace.engine.layers.rope import HeadBuffer


@dataclass(slots=True)
class StepContext:
    """Tensors of one step, for `num_tokens` rows.

    `token_ids` [tokens] is numpy, since embeddings may be read from a mapped file. `heads[layer]` takes the layer's
    projections, shared by the layers of equal geometry and rope. `caches[layer]` is the layer's part of the KV pool, `write_slots[g]`
    [tokens] the token slots of cache group g to write, `prepared[layer]` what the attention backend made for this step.
    """

    token_ids: np.ndarray
    heads: Sequence[HeadBuffer]
    caches: Sequence[Layer]
    group_of: Sequence[int]
    write_slots: Sequence[torch.Tensor]
    prepared: Sequence[Any]
    attention: AttentionBackend

    def attend(self, layer: int, projected: torch.Tensor) -> torch.Tensor:
        """Rotate queries and keys, write keys and values, then attend.

        `projected` [tokens, (heads + 2 * kv_heads) * head_dim] → [tokens, heads * head_dim].
        """
        heads, cache = self.heads[layer], self.caches[layer]
        heads.fill_and_store(projected, cache, self.write_slots[self.group_of[layer]])
        return self.attention.attend(heads.q, heads.k, heads.v, cache, self.prepared[layer])
