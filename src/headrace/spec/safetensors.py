"""Headers of safetensors files: which tensors they hold, of which type and shape. Read from the format's definition."""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import CorruptCheckpoint

INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
_ELEMENT_BYTES |= {"F8_E4M3": 1, "F8_E8M0": 1}


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor: its type as the format spells it (F32, BF16, F8_E4M3, …) and where its bytes lie in `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def checkpoint_paths(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model folder; a shard that its index names and that is absent is a CorruptCheckpoint."""
    index = folder / INDEX
    if index.exists():
        try:
            table = json.loads(index.read_text())["weight_map"]
            shards = sorted(set(table.values()))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CorruptCheckpoint(f"{INDEX} is not a weights index: {error}", field=str(index)) from None
        for shard in shards:
            if not isinstance(shard, str):
                raise CorruptCheckpoint(f"{INDEX} names a shard {shard!r}", field=str(index))
            if Path(shard).name != shard or not (folder / shard).is_file():
                raise CorruptCheckpoint(f"shard {shard} named by {INDEX} is missing", field=shard or str(index))
        return tuple(folder / shard for shard in shards)
    return tuple(sorted(folder.glob("*.safetensors")))


def read_headers(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of all files by name; every entry is checked against its file's size. Raises CorruptCheckpoint."""
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        for name, tensor in _read_header(path).items():
            if name in tensors:
                raise CorruptCheckpoint(f"tensor {name!r} is in two shards", field=name)
            tensors[name] = tensor
    return tensors


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CorruptCheckpoint(f"{path.name} is truncated or not a safetensors file", field=str(path))
        try:
            table = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"{path.name} has a damaged header: {error}", field=str(path)) from None
    if not isinstance(table, dict):
        raise CorruptCheckpoint(f"{path.name} has a damaged header", field=str(path))
    table.pop("__metadata__", None)
    return {name: _entry(path, name, fields, 8 + length, size) for name, fields in table.items()}


def _entry(path: Path, name: str, fields: Any, start: int, size: int) -> StoredTensor:
    try:
        dtype, shape = str(fields["dtype"]), tuple(int(n) for n in fields["shape"])
        begin, end = (int(n) for n in fields["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError):  # JSON knows Infinity
        raise CorruptCheckpoint(f"tensor {name!r} has a damaged entry in {path.name}", field=name) from None
    if min((begin, *shape), default=0) < 0 or end < begin:
        raise CorruptCheckpoint(f"tensor {name!r} has impossible offsets or shape in {path.name}", field=name)
    if start + end > size:
        raise CorruptCheckpoint(
            f"tensor {name!r} ends at byte {start + end}, {path.name} at {size}: truncated?", field=name
        )
    element = _ELEMENT_BYTES.get(dtype)
    if element is not None and end - begin != prod(shape) * element:
        raise CorruptCheckpoint(f"tensor {name!r}: {end - begin} bytes do not hold {dtype} {list(shape)}", field=name)
    return StoredTensor(path, dtype, shape, start + begin, end - begin)
