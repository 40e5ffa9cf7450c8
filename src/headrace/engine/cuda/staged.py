"""Keys of unfinished groups, where the cache holds keys of 4 bits: which are staged, and where on the device they are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from headrace.control.step import StepPlan
from headrace.engine.backend import Limits
from headrace.engine.cuda.pool import KVPool
from headrace.engine.kernels.groups import restage_keys
from headrace.engine.staging import StagedGroups, group_places
from headrace.spec.cache import CacheLayout
from headrace.spec.precision import kv_precision


class StagedKeys:
    """`layers` [layers, slots, kv_heads, group, head_dim], in the type that is computed in; the host's part is what `plan` keeps."""

    def __init__(
        self, layout: CacheLayout, limits: Limits, num_layers: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._size = kv_precision(layout.kv_precision).key_group
        # Kernels leave alone what was not staged.
        shape = (num_layers, limits.max_num_seqs, layout.num_kv_heads, self._size, layout.head_dim)
        self.layers = torch.empty(shape, dtype=dtype, device=device)
        self._layout = layout
        self._groups = StagedGroups(layout, limits.max_num_seqs, limits.num_blocks)

    @property
    def nbytes(self) -> int:
        return self.layers.nbytes

    def plan(self, plan: StepPlan, tables: npt.NDArray[np.int32]) -> dict[str, np.ndarray]:
        """Note what a step will stage; by name what must be staged from the pool first, [n, 2] of each cache group that has any.

        `tables` [groups, slots, blocks]: those of the step.
        """
        if plan.copies:
            self._groups.copied([c.target for c in plan.copies])
        if not plan.chunks:
            return {}
        slots, starts, lengths = (
            np.array([getattr(c, name) for c in plan.chunks], np.int64) for name in ("slot", "start", "length")
        )
        width, found = int((starts + lengths - 1).max()) // self._layout.block_tokens + 1, {}
        for group, whole in enumerate(tables):
            table = whole[slots, :width]
            rows = np.flatnonzero(self._groups.begin(group, slots, starts, lengths, table))
            if len(rows):
                places = group_places(table, rows, starts[rows] // self._size, self._layout.block_tokens, self._size)
                found[f"restaged {group}"] = np.stack([slots[rows], places], 1).astype(np.int32)
        return found

    def restage(self, pool: KVPool, group: int, groups: torch.Tensor) -> None:
        """Launch what `plan` found of one cache group, [n, 2]."""
        for place, layer in enumerate(self._layout.groups[group].layers):
            kv, scales = pool.layer(place)
            restage_keys(kv, scales, self.layers[layer], groups)
