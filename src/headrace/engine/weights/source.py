"""What every weights format offers: named tensors as fp32 arrays, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.errors import CorruptCheckpoint

Floats = npt.NDArray[np.float32]


class Rows(Protocol):
    """Rows of a matrix that stays where it is stored (a mapped file); used for embedding tables."""

    def read(self, ids: npt.NDArray[np.int64]) -> Floats:
        """Rows `ids` as fp32 [len(ids), columns]; ids must be in range."""
        ...


class Stored(msgspec.Struct, frozen=True):
    """Consecutive rows of a tensor as its file holds them: `kind` is the ggml type's name (plain ones: f32, f16, bf16).

    `data` [rows, bytes of a row] is a view of the mapped file where there is one; leading dimensions are folded into rows.
    """

    kind: str
    data: npt.NDArray[np.uint8]
    columns: int

    @property
    def rows(self) -> int:
        return len(self.data)

    def part(self, first: int, count: int) -> Stored:
        return Stored(self.kind, self.data[first : first + count], self.columns)

    @classmethod
    def of_floats(cls, values: Floats) -> Stored:
        flat = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
        return cls("f32", flat.view(np.uint8), values.shape[-1])


_BY_TOKEN = re.compile(r"embed|token_embd|lm_head|^output\.")


def finite(name: str, values: Floats) -> Floats:
    """The values; CorruptCheckpoint names tensor `name` if one is NaN or infinite.

    Tables with a row per token are let be: a bad row harms who meets its token, and vocabularies have unused ones.
    """
    if _BY_TOKEN.search(name):
        return values
    with np.errstate(all="ignore"):
        total = values.sum()  # reads once and keeps nothing, unlike asking each value
    if not np.isfinite(total) and not np.isfinite(values).all():
        raise CorruptCheckpoint(f"tensor {name!r} holds NaN or infinity", field=name, remedy="download it again")
    return values


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

    def stored(self, name: str) -> Stored:
        """The tensor's bytes as stored, nothing converted; a type that has no ggml name is given as f32."""
        ...
