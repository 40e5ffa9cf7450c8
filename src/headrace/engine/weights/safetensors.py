"""Tensors of safetensors files, single or sharded, memory-mapped; read from the format's definition, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.base.errors import CorruptCheckpoint, UnsupportedModel
from headrace.engine.weights.source import Floats, Stored, finite

_MAX_HEADER_BYTES = 100_000_000
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
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsSource:
    """A `TensorSource` over the files of one checkpoint; every header is checked against its file when it is opened."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._entries: dict[str, _Entry] = {}
        self._maps: dict[Path, np.memmap] = {}
        for path in paths:
            for name, entry in _read_header(path).items():
                if name in self._entries:
                    raise CorruptCheckpoint(f"tensor {name!r} is in two shards", field=name)
                self._entries[name] = entry

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

    def _entry(self, name: str) -> _Entry:
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


def checkpoint_paths(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model folder; a shard that its index names and that is absent is a CorruptCheckpoint."""
    index = folder / INDEX
    if index.exists():
        try:
            table = json.loads(index.read_text())["weight_map"]
            shards = sorted(set(table.values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CorruptCheckpoint(f"{INDEX} is not a weights index: {error}", field=str(index)) from None
        for shard in shards:
            if not isinstance(shard, str):
                raise CorruptCheckpoint(f"{INDEX} names a shard {shard!r}", field=str(index))
            if Path(shard).name != shard or not (folder / shard).is_file():
                raise CorruptCheckpoint(f"shard {shard} named by {INDEX} is missing", field=shard or str(index))
        return tuple(folder / shard for shard in shards)
    return tuple(sorted(folder.glob("*.safetensors")))


def _to_fp32(array: npt.NDArray[np.generic]) -> Floats:
    if array.dtype == np.uint16:
        out = np.empty(array.shape, np.float32)
        np.left_shift(array, 16, out=out.view(np.uint32), dtype=np.uint32)
        return out
    return array.astype(np.float32, copy=False)


def _read_header(path: Path) -> dict[str, _Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CorruptCheckpoint(f"{path.name} is truncated or not a safetensors file", field=str(path))
        try:
            table = json.loads(file.read(length))
        except ValueError as error:
            raise CorruptCheckpoint(f"{path.name} has a damaged header: {error}", field=str(path)) from None
    if not isinstance(table, dict):
        raise CorruptCheckpoint(f"{path.name} has a damaged header", field=str(path))
    table.pop("__metadata__", None)
    return {name: _entry(path, name, fields, 8 + length, size) for name, fields in table.items()}


def _entry(path: Path, name: str, fields: object, start: int, size: int) -> _Entry:
    try:
        dtype, shape = str(fields["dtype"]), tuple(int(n) for n in fields["shape"])
        begin, end = (int(n) for n in fields["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CorruptCheckpoint(f"tensor {name!r} has a damaged entry in {path.name}", field=name) from None
    if min((begin, *shape), default=0) < 0 or end < begin:
        raise CorruptCheckpoint(f"tensor {name!r} has impossible offsets or shape in {path.name}", field=name)
    if start + end > size:
        raise CorruptCheckpoint(
            f"tensor {name!r} ends at byte {start + end}, {path.name} at {size}: truncated?", field=name
        )
    stored = (_DTYPES | _CODE_DTYPES).get(dtype)
    if stored is not None and end - begin != prod(shape) * np.dtype(stored).itemsize:
        raise CorruptCheckpoint(f"tensor {name!r}: {end - begin} bytes do not hold {dtype} {list(shape)}", field=name)
    return _Entry(path, dtype, shape, start + begin, end - begin)
