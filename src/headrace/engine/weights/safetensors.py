"""Tensors of safetensors files, single or sharded, memory-mapped; read from the format's definition, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.base.errors import CorruptCheckpoint, UnsupportedModel
from headrace.engine.weights.source import Floats, Stored, finite
from headrace.spec.safetensors import INDEX, StoredTensor, checkpoint_paths, read_headers

__all__ = ["INDEX", "SafetensorsRows", "SafetensorsSource", "checkpoint_paths"]

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_CODE_DTYPES = {
    "I8": "i1",
    "U8": "u1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "F8_E4M3": "u1",
    "F8_E8M0": "u1",
}
"""Types that only quantized checkpoints use; floats of 8 bits are given as their bytes."""
_GGML_NAMES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


class SafetensorsSource:
    """A `TensorSource` over the files of one checkpoint; every header is checked against its file when it is opened."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._entries = read_headers(paths)
        self._maps: dict[Path, np.memmap] = {}

    def names(self) -> Iterable[str]:
        return self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def read(self, name: str) -> Floats:
        return finite(name, _to_fp32(self._mapped(name)))

    def rows(self, name: str) -> SafetensorsRows:
        return SafetensorsRows(self._mapped(name))

    def stored(self, name: str) -> Stored:
        kind = _GGML_NAMES.get(self._entry(name).dtype)
        if kind is None:
            return Stored.of_floats(self.read(name))
        mapped = self._mapped(name)
        columns = mapped.shape[-1] if mapped.ndim else 1
        return Stored(kind, mapped.reshape(-1, columns).view(np.uint8), columns)

    def dtype(self, name: str) -> str:
        """The type as safetensors spells it: F32, I8, F8_E4M3, …"""
        return self._entry(name).dtype

    def codes(self, name: str) -> npt.NDArray[np.generic]:
        """The tensor as stored, a view of the mapped file: whole numbers as they are, 16-bit brain floats and 8-bit floats as
        unsigned numbers of their bits."""
        return self._mapped(name, _DTYPES | _CODE_DTYPES)

    def _entry(self, name: str) -> StoredTensor:
        if name not in self._entries:
            raise CorruptCheckpoint(f"tensor {name!r} is missing", field=name)
        return self._entries[name]

    def _mapped(self, name: str, known: dict[str, str] = _DTYPES) -> npt.NDArray[np.generic]:
        entry = self._entry(name)
        if entry.dtype not in known:
            raise UnsupportedModel(f"tensor {name!r} has type {entry.dtype}", field=name)
        if entry.path not in self._maps:
            self._maps[entry.path] = np.memmap(entry.path, np.uint8, "r")
        raw = np.asarray(self._maps[entry.path][entry.offset : entry.offset + entry.nbytes])
        return raw.view(known[entry.dtype]).reshape(entry.shape)


class SafetensorsRows:
    """Rows of one mapped matrix."""

    def __init__(self, mapped: npt.NDArray[np.generic]) -> None:
        self._mapped = mapped

    def read(self, ids: npt.NDArray[np.int64]) -> Floats:
        return _to_fp32(self._mapped[ids])


def _to_fp32(array: npt.NDArray[np.generic]) -> Floats:
    if array.dtype == np.uint16:
        out = np.empty(array.shape, np.float32)
        np.left_shift(array, 16, out=out.view(np.uint32), dtype=np.uint32)
        return out
    return array.astype(np.float32, copy=False)
