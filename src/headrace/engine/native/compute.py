"""`Compute` over one `headrace_native.Model`: arrays in, token ids out, nothing allocated per step but the step's indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import headrace_native
import numpy as np
import numpy.typing as npt

from headrace.control.step import TokenLogprobs
from headrace.engine.batch import Batch, Ints
from headrace.engine.native.memory import buffer
from headrace.engine.native.rotations import Rotations
from headrace.engine.native.sampler import sample, token_logprobs
from headrace.engine.sampler.rows import Rows, Sampled
from headrace.engine.sampler.state import SamplingState
from headrace.engine.staging import StagedGroups
from headrace.spec.cache import CacheLayout

KV_TYPES = {"fp16": 0, "fp32": 1, "int8": 2, "fp8": 3, "int4": 4, "bf16": 5}


class NativeCompute:
    """See `headrace.engine.compute.Compute`. Owns the KV pool."""

    def __init__(
        self,
        model: headrace_native.Model,
        pool: headrace_native.Pool,
        layout: CacheLayout,
        num_blocks: int,
        rotations: list[Rotations],
        vocab_size: int,
        max_num_seqs: int,
        staging_bytes: int,
        kernels: str = "auto",
    ) -> None:
        self.vocab_size = vocab_size
        self.kv = buffer(num_blocks * layout.bytes_per_block)
        self._model = model
        self._pool, self._kernels = pool, kernels
        self._rotations = rotations
        self._logits = np.empty((0, vocab_size), np.float32)
        self._block_tokens = layout.block_tokens
        model.set_kv(
            self.kv,
            KV_TYPES[layout.kv_precision],
            layout.layers_per_group,
            num_blocks,
            layout.block_tokens,
            layout.num_kv_heads,
            layout.head_dim,
            layout.value_dim,
            layout.num_groups,
        )
        self._groups: StagedGroups | None = None
        self.staging = buffer(staging_bytes)
        if staging_bytes:
            self._groups = StagedGroups(layout, max_num_seqs, num_blocks)
            model.set_staging(self.staging, max_num_seqs)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self._model.copy_block(source, target)
        if self._groups is not None:
            self._groups.copied(targets)

    def hidden(self, batch: Batch, rows: Ints, begun: Callable[[], None]) -> npt.NDArray[np.int64]:
        count, positions = len(batch.slots), batch.positions
        row_start = np.empty(count + 1, np.int32)
        row_start[:count], row_start[count] = batch.first_rows, len(positions)
        last = int(positions.max())
        tables = batch.first_blocks(last // self._block_tokens + 1)
        angles = [r.at(positions, last) for r in self._rotations]
        broken = np.zeros(count, np.uint8)
        staging: tuple[np.ndarray, ...] = ()
        if self._groups is not None:
            place = batch.slots, batch.starts, batch.lengths
            restored = [self._groups.begin(group, *place, table) for group, table in enumerate(tables)]
            staging = (batch.slots.astype(np.int32), np.concatenate(restored).astype(np.uint8))
        given = (
            batch.tokens,
            row_start,
            batch.starts.astype(np.int32),
            tables,
            [cos for cos, _ in angles],
            [sin for _, sin in angles],
            rows.astype(np.int32),
            broken,
            *staging,
        )
        begun()
        self._model.step(*given)
        return np.flatnonzero(broken)

    def discard(self, blocks: Sequence[int]) -> None:
        """Nothing to do: attention never multiplies by what lies outside the tokens that its sequence sees."""

    def logits(self, first: int, count: int) -> npt.NDArray[np.float32]:
        if count > len(self._logits):
            self._logits = np.empty((count, self.vocab_size), np.float32)
        out = self._logits[:count]
        self._model.logits(first, out)
        return out

    def sample(self, logits: npt.NDArray[np.float32], rows: Rows, state: SamplingState) -> Sampled:
        return sample(logits, rows, state, self._pool, self._kernels)

    def token_logprobs(
        self, logits: npt.NDArray[np.float32], ids: npt.NDArray[np.int64], wanted: Sequence[int]
    ) -> list[TokenLogprobs] | None:
        if not np.isfinite(logits.sum()):
            return None
        return token_logprobs(logits, ids, wanted, self._pool)
