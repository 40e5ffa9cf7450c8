"""A model's view of its weights: tensors are taken by name and shape, and what is left over is an error."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from headrace.base.errors import CorruptCheckpoint
from headrace.engine.weights.source import Floats, Rows, Stored, TensorSource

if TYPE_CHECKING:
    from headrace.engine.quant.arrays import QuantArrays

_DERIVED = re.compile(r"rotary_emb\.inv_freq$|^rope_freqs\.weight$|^rope_factors_(long|short)\.weight$")
"""Tensors that repeat what the configuration says; they are never taken."""


class Checkpoint:
    """Takes tensors from a source. Each may be taken several times; `finish` refuses tensors that were never taken."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        # Asked of the source rather than of its class, so that a start imports the one kind of source that it reads.
        self._made_up = hasattr(source, "read_as")
        self._may_be_packed = hasattr(source, "is_packed")
        self._taken: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Tensor `name` as fp32; CorruptCheckpoint if it is missing, not of `shape` or holds NaN or infinity."""
        self._check(name, shape)
        if self._made_up:
            return self._source.read_as(name, shape)
        return self._source.read(name)

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored:
        """Tensor `name` as its file holds it; CorruptCheckpoint if it is missing or not of `shape`."""
        self._check(name, shape)
        if self._made_up:
            return Stored.of_floats(self._source.read_as(name, shape))
        return self._source.stored(name)

    def packed(self, name: str, shape: tuple[int, ...]) -> QuantArrays | None:
        """Matrix `name` as a quantized checkpoint holds it, or None where it is plain; CorruptCheckpoint as for `take`."""
        if not self._may_be_packed or not self._source.is_packed(name):
            return None
        self._check(name, shape)
        return self._source.packed(name)

    def is_packed(self, name: str) -> bool:
        """Whether matrix `name` is stored quantized."""
        return self._may_be_packed and self._source.is_packed(name)

    def rows(self, name: str, shape: tuple[int, int]) -> Rows | None:
        """Row access to matrix `name` in its file, or None for weights without a file."""
        self._check(name, shape)
        return self._source.rows(name)

    def has(self, name: str) -> bool:
        """Whether the tensor exists (dummy weights have every one)."""
        return self._made_up or name in self._source.names()

    def leave(self, name: str) -> None:
        """Say that `name` may be present and is not needed."""
        self._taken.add(name)

    def finish(self) -> None:
        """CorruptCheckpoint naming tensors that nothing took: the config does not describe these weights."""
        extra = sorted(n for n in self._source.names() if n not in self._taken and not _DERIVED.search(n))
        if extra:
            more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
            raise CorruptCheckpoint(
                f"tensors that the config has no place for: {', '.join(extra[:3])}{more}",
                field=extra[0],
                remedy="check that config and weights belong together",
            )

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        self._taken.add(name)
        if self._made_up:
            return
        found = self._source.shape(name)
        if found != shape:
            raise CorruptCheckpoint(
                f"tensor {name!r} has shape {list(found)}, the config needs {list(shape)}", field=name
            )
