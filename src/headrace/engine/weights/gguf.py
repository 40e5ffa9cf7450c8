"""Tensors of a GGUF file, memory-mapped and dequantized when they are read."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.base.errors import CorruptCheckpoint, UnsupportedModel
from headrace.engine.weights.dequantize import SUPPORTED, dequantize
from headrace.engine.weights.source import Floats, Stored, finite
from headrace.spec.ggml import GGMLType
from headrace.spec.gguf import GGUFHeader, GGUFTensor


class GGUFSource:
    """A `TensorSource` over a header; UnsupportedModel names the first tensor of a type that cannot be dequantized."""

    def __init__(self, header: GGUFHeader) -> None:
        if header.byte_order != "little":
            raise UnsupportedModel(f"{header.path.name} is big-endian", field=str(header.path), remedy="convert it")
        for tensor in header.tensors.values():
            if tensor.type.name not in SUPPORTED:
                raise UnsupportedModel(
                    f"tensor {tensor.name!r} has type {tensor.type.name}",
                    field=tensor.name,
                    remedy="use a file with one of: " + ", ".join(sorted(SUPPORTED)),
                )
        self._tensors = header.tensors
        self._maps: dict[Path, np.memmap] = {}

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str) -> Floats:
        tensor = self._tensor(name)
        out = np.empty(tensor.shape, np.float32)
        dequantize(self._raw(tensor), tensor.type, out)
        return finite(name, out)

    def rows(self, name: str) -> GGUFRows:
        tensor = self._tensor(name)
        rows, columns = tensor.shape
        return GGUFRows(self._raw(tensor).reshape(rows, tensor.nbytes // rows), tensor.type, columns)

    def stored(self, name: str) -> Stored:
        tensor = self._tensor(name)
        rows = prod(tensor.shape[:-1])
        return Stored(tensor.type.name, self._raw(tensor).reshape(rows, -1), tensor.shape[-1])

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise CorruptCheckpoint(f"tensor {name!r} is missing", field=name)
        return self._tensors[name]

    def _raw(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        if tensor.path not in self._maps:
            self._maps[tensor.path] = np.memmap(tensor.path, np.uint8, "r")
        raw = self._maps[tensor.path][tensor.offset : tensor.offset + tensor.nbytes]
        if len(raw) != tensor.nbytes:
            raise CorruptCheckpoint(f"tensor {tensor.name!r} is cut off: the file was truncated", field=tensor.name)
        return np.asarray(raw)


class GGUFRows:
    """Rows of one mapped tensor, dequantized as they are asked for."""

    def __init__(self, raw: npt.NDArray[np.uint8], kind: GGMLType, columns: int) -> None:
        self._raw = raw
        self._kind = kind
        self._columns = columns

    def read(self, ids: npt.NDArray[np.int64]) -> Floats:
        out = np.empty((len(ids), self._columns), np.float32)
        dequantize(self._raw[ids], self._kind, out)
        return out
