"""What an attention backend is given and must give back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headrace.engine.batch import Spans


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """One layer's attention. `window`: tokens a query sees, itself included. `sinks` [num_heads]: logits of a virtual key
    with no value (they only widen the softmax's denominator). `softcap`: scores become cap * tanh(score / cap)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class Layer(Protocol):
    """One layer's keys and values in the pool, in whatever format. Attention that needs more of it says what."""

    num_kv_heads: int

    def write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store `kv` [tokens, 2 * kv_heads * head_dim] at token slots `slots` (block * block_tokens + offset), and put into
        `kv` what others will read back, so that a step's own tokens see the same."""
        ...

    def gather(self, blocks: torch.Tensor, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv_heads, tokens, head_dim] of `rows` equally long lists of blocks, given flat."""
        ...


class LayerCache:
    """One layer's keys and values: `kv` [blocks, block_tokens, 2 * kv_heads, head_dim], key heads first.

    A token's vectors lie together, so that writing a token and gathering a block are each one contiguous copy; seen as
    `vectors` [blocks * block_tokens * 2 * kv_heads, head_dim], the pool is a table that kernels can read in place.
    """

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv
        self.num_kv_heads = kv.shape[2] // 2
        self.blocks = kv.flatten(1)
        self.vectors = kv.flatten(0, 2)
        self.columns = self.vectors.t()
        self._tokens = kv.flatten(0, 1).flatten(1)
        self.address = (
            kv.data_ptr() if kv.dtype == torch.float32 and kv.is_contiguous() and kv.device.type == "cpu" else None
        )
        """Where fp32 vectors can be written to directly, one token's after the other's; None for other pools."""

    def write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """See `Layer`."""
        if kv.dtype == self.kv.dtype:
            self._tokens.index_copy_(0, slots, kv)
        else:
            stored = kv.to(self.kv.dtype)
            self._tokens.index_copy_(0, slots, stored)
            kv.copy_(stored)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """See `headrace.engine.attention.naive.ReadableLayer`."""
        return self.kv.flatten(0, 1)[slots].float()

    def gather(self, blocks: torch.Tensor, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv_heads, tokens, head_dim] of `rows` equally long lists of blocks, given flat."""
        found = self.blocks.index_select(0, blocks).to(dtype)
        found = found.view(rows, -1, 2 * self.num_kv_heads, self.kv.shape[-1]).transpose(1, 2)
        return found[:, : self.num_kv_heads], found[:, self.num_kv_heads :]


class AttentionBackend(Protocol):
    """One way to compute attention; stateless, so that one instance serves any model."""

    name: str

    def unsupported(self, kind: AttentionKind, device: torch.device, dtype: torch.dtype) -> str | None:
        """None if this backend computes `kind` there, else the reason in one line."""
        ...

    def prepare(
        self,
        spans: Spans,
        kind: AttentionKind,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> Any:
        """What all layers of one group and kind share in a step: indices, masks, buckets. `kv_dtype`: the cache's, the
        queries' `dtype` if None."""
        ...

    def advance(self, prepared: Any, spans: Spans) -> bool:
        """Make `prepared`, of the step before, what `prepare` would give for `spans`, which is cheap where the same
        sequences are each one token further. False where that cannot be done: then it is as it was."""
        ...

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Layer, prepared: Any) -> torch.Tensor:
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] of this step → [tokens, heads * head_dim]."""
        ...
