"""What every weights format offers: named tensors as fp32 arrays, without torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Rows(Protocol):
    """Rows of a matrix that stays where it is stored (a mapped file); used for embedding tables."""

    def read(self, ids: npt.NDArray[np.int64]) -> Floats:
        """Rows `ids` as fp32 [len(ids), columns]; ids must be in range."""
        ...


class TensorSource(Protocol):
    """Tensors of one checkpoint. `shape` and `read` raise `CorruptCheckpoint` naming a tensor that is absent or damaged."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Floats:
        """The whole tensor as fp32 (exact for every narrower format); may be a read-only view of a mapped file."""
        ...

    def rows(self, name: str) -> Rows | None:
        """Row access without loading the tensor, or None where the format keeps no file."""
        ...
