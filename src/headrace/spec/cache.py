"""How the KV cache of one model is cut into blocks: the contract between the block pool, the executors and the planner.

Layers whose cache behaves alike form a *group*; every group of a request has its own block table, and one pool of
equal-sized blocks serves them all. A block holds `block_tokens` tokens of `layers_per_group` layers, so a model with
15 sliding and 3 full layers becomes five sliding groups and one full group of three layers each, and memory moves
freely between them. A model with a single kind of layer has exactly one group with all its layers.
"""

from __future__ import annotations

import msgspec


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers that share a block table. `window`: tokens a query sees, itself included; None means the whole context."""

    layers: tuple[int, ...]
    window: int | None = None


class CacheLayout(msgspec.Struct, frozen=True):
    """The shape of one cache.

    Block `b`, slot `s` stores keys and values of the s-th layer of whichever group owns the block:
    `num_kv_heads` x `block_tokens` x (`head_dim` keys + `value_dim` values) of `kv_precision`, plus scales if it has any.
    MLA is one head of `head_dim` = latent + rotary key without values; `index_bytes_per_token` is what a sparse indexer keeps
    beside it per layer. `whole_blocks`: a block that is not full yet must not be shared, since what it holds changes until it is.
    `bytes_per_block` is for all `layers_per_group` slots and is what one block really allocates.
    """

    groups: tuple[CacheGroup, ...]
    layers_per_group: int
    block_tokens: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    kv_precision: str
    bytes_per_block: int
    index_bytes_per_token: int = 0
    whole_blocks: bool = False

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    def place(self, layer: int) -> tuple[int, int]:
        """Group and slot of a layer; KeyError for a layer without a cache of its own."""
        for g, group in enumerate(self.groups):
            if layer in group.layers:
                return g, group.layers.index(layer)
        raise KeyError(layer)
