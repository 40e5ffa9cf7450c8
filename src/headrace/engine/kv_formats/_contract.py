"""What a KV format is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
import torch

from headrace.engine.attention._contract import AttentionBackend, Layer
from headrace.engine.backend import Limits
from headrace.engine.batch import Batch
from headrace.spec.cache import CacheLayout


class Pool(Protocol):
    """The KV blocks of all layers. `nbytes` is layout.bytes_per_block * num_blocks to the byte; `staging_bytes` is what else
    is kept (`spec.accounting.kv_staging_bytes`). `dtype`: the type in which vectors lie in the pool, for attention that reads
    it in place; of codes, one that no attention computes in."""

    attention: ClassVar[AttentionBackend | None]
    """The only attention that can read it; None: any."""

    nbytes: int
    staging_bytes: int
    dtype: torch.dtype

    def __init__(
        self, layout: CacheLayout, limits: Limits, dtype: torch.dtype, device: torch.device, num_layers: int
    ) -> None: ...

    def layer(self, layer: int, slot: int, group: int) -> Layer:
        """The part of layer `layer`: index `slot` of the blocks of cache group `group`."""
        ...

    def begin(self, batch: Batch) -> None:
        """A step begins; called before its first write."""
        ...

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks, all layers."""
        ...

    def zero(self, token_slots: np.ndarray) -> None:
        """Make what lies in token slots that were never written harmless to attention that multiplies it by zero."""
        ...

    def discard(self, blocks: Sequence[int]) -> None:
        """What lies in these blocks may not be finite and must not reach their next owners."""
        ...
