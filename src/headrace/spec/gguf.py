"""Reading GGUF headers: metadata and the table of tensors, memory-mapped, nothing executed, nothing trusted.

Written from the format's specification (versions 2 and 3, either byte order). Geometry from such a header is in
`headrace.spec.gguf_models`; `spec_from_gguf` is offered here too.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headrace.base.errors import CorruptCheckpoint, InvalidInput
from headrace.spec.ggml import GGML_TYPES, GGMLType

if TYPE_CHECKING:
    from headrace.spec.model import ModelSpec

__all__ = ["GGML_TYPES", "GGMLType", "GGUFHeader", "GGUFTensor", "read_gguf", "spec_from_gguf"]

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NUMPY: dict[int, str] = {
    0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "u1", 10: "u8", 11: "i8", 12: "f8",
}  # fmt: skip
_MAX_DIMS = 4
_MAX_NESTING = 4
_MAX_SPLITS = 10_000
_MAX_VECTOR_BYTES = 1 << 16
_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")

Value = Any


class GGUFTensor(msgspec.Struct, frozen=True):
    """One tensor. `shape` is in numpy order (slowest first, so a linear layer is [out, in]); `offset` is from the start of `path`."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int
    path: Path


class GGUFHeader(msgspec.Struct, frozen=True):
    """Metadata and tensors of one model, all shards together.

    `metadata` holds Python scalars and strings; numeric arrays are numpy arrays, arrays of strings are lists.
    """

    path: Path
    version: int
    byte_order: str
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise CorruptCheckpoint("general.architecture is missing", field=str(self.path))
        return value

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, first shard first."""
        return tuple(dict.fromkeys([self.path, *(t.path for t in self.tensors.values())]))

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors as stored, alignment left out."""
        return sum(t.nbytes for t in self.tensors.values())

    def vector(self, name: str) -> tuple[float, ...]:
        """The values of a small fp32 tensor (rope factors); empty where there is none. CorruptCheckpoint for any other type."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return ()
        if tensor.type.name != "f32" or tensor.nbytes > _MAX_VECTOR_BYTES:
            raise CorruptCheckpoint(f"tensor {name!r} is not a short fp32 vector", field=name)
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            values = np.frombuffer(file.read(tensor.nbytes), "<f4" if self.byte_order == "little" else ">f4")
        return tuple(float(v) for v in values)


def read_gguf(path: str | Path) -> GGUFHeader:
    """Read the header of a GGUF file; given a shard, of the whole set.

    Raises InvalidInput if there is no such file, CorruptCheckpoint if it is not GGUF, is truncated, or says something
    impossible (counts beyond the file, unknown types, tensors past its end, a missing shard).
    """
    path = Path(path)
    split = _SPLIT_NAME.match(path.name)
    if split is None:
        return _read_one(path)
    count = int(split["count"])
    if not 0 < count <= _MAX_SPLITS or not 0 < int(split["number"]) <= count:
        raise CorruptCheckpoint(f"{path.name}: impossible shard number", field=str(path))
    headers = []
    for number in range(1, count + 1):
        shard = path.with_name(f"{split['stem']}-{number:05d}-of-{count:05d}.gguf")
        if not shard.exists():
            raise CorruptCheckpoint(f"shard {shard.name} is missing", field=str(shard))
        headers.append(_read_one(shard))
    tensors: dict[str, GGUFTensor] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CorruptCheckpoint(f"tensor {name!r} is in two shards", field=name)
            tensors[name] = tensor
    first = headers[0]
    declared = first.metadata.get("split.tensors.count")
    if declared is not None and declared != len(tensors):
        raise CorruptCheckpoint(f"{declared} tensors declared, {len(tensors)} found in the shards", field=str(path))
    return GGUFHeader(first.path, first.version, first.byte_order, first.metadata, tensors)


def spec_from_gguf(header: GGUFHeader, name: str = "") -> ModelSpec:
    """Geometry of the model in a GGUF file; see `headrace.spec.gguf_models`."""
    from headrace.spec.gguf_models import spec_from_gguf as build

    return build(header, name)


def _read_one(path: Path) -> GGUFHeader:
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < 24:
                raise CorruptCheckpoint(f"{path.name} is too short to be a GGUF file", field=str(path))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data, path).header()
    except FileNotFoundError:
        raise InvalidInput(f"no such file: {path}", field="model") from None
    except IsADirectoryError:
        raise InvalidInput(f"{path} is a folder, not a GGUF file", field="model") from None


class _Reader:
    """A cursor over one mapped file. Every count is checked against the bytes that are left before it is used."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.size = len(data)
        self.path = path
        self.at = 0
        self.order = "<"

    def header(self) -> GGUFHeader:
        if self.data[:4] != _MAGIC:
            raise self._corrupt(f"not a GGUF file: it starts with {self.data[:4]!r}")
        self.at = 4
        version = self._scalar("I")
        if version > 0xFFFF:
            # A big-endian file read as little-endian shows its small version number in the high bytes.
            self.order, self.at = ">", 4
            version = self._scalar("I")
        if version not in (2, 3):
            raise self._corrupt(f"GGUF version {version} is not supported (2 and 3 are)")
        num_tensors = self._count(24, "tensors")
        num_entries = self._count(13, "metadata entries")
        metadata: dict[str, Value] = {}
        for _ in range(num_entries):
            key = self._string("metadata key")
            if key in metadata:
                raise self._corrupt(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(self._scalar("I"), key, 0)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self._corrupt(f"general.alignment {alignment!r} is not a power of two")
        entries = [self._tensor() for _ in range(num_tensors)]
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, relative in entries:
            nbytes = prod(shape) // kind.block_elements * kind.block_bytes
            offset = start + relative
            if name in tensors:
                raise self._corrupt(f"tensor {name!r} appears twice")
            if relative % alignment:
                raise self._corrupt(f"tensor {name!r} is at {relative}, not aligned to {alignment}", name)
            if offset + nbytes > self.size:
                raise self._corrupt(
                    f"tensor {name!r} ends at byte {offset + nbytes}, the file at {self.size}: truncated?", name
                )
            tensors[name] = GGUFTensor(name, shape, kind, offset, nbytes, self.path)
        self._refuse_overlaps(tensors)
        return GGUFHeader(self.path, version, "little" if self.order == "<" else "big", metadata, tensors)

    def _refuse_overlaps(self, tensors: Mapping[str, GGUFTensor]) -> None:
        end, last = 0, ""
        for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
            if tensor.nbytes and tensor.offset < end:
                raise self._corrupt(f"tensors {last!r} and {tensor.name!r} overlap", tensor.name)
            if tensor.nbytes:
                end, last = tensor.offset + tensor.nbytes, tensor.name

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLType, int]:
        name = self._string("tensor name")
        dims = self._scalar("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self._corrupt(f"tensor {name!r} has {dims} dimensions", name)
        shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]
        code = self._scalar("I")
        kind = GGML_TYPES.get(code)
        if kind is None:
            raise self._corrupt(f"tensor {name!r} has unknown type {code}", name)
        if shape[-1] % kind.block_elements:
            raise self._corrupt(
                f"tensor {name!r}: rows of {shape[-1]} are not whole {kind.name} blocks of {kind.block_elements}", name
            )
        return name, shape, kind, self._scalar("Q")

    def _value(self, kind: int, key: str, depth: int) -> Value:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            raise self._corrupt(f"metadata {key!r} has unknown type {kind}", key)
        item = self._scalar("I")
        if item in _NUMPY:
            dtype = np.dtype(self.order + _NUMPY[item])
            count = self._count(dtype.itemsize, f"items of {key!r}")
            raw = self._take(count * dtype.itemsize)
            values = np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))
            return values.astype(bool) if item == 7 else values
        if item == _STRING:
            return self._strings(self._count(8, f"strings of {key!r}"), key)
        if item == _ARRAY and depth < _MAX_NESTING:
            return [self._value(_ARRAY, key, depth + 1) for _ in range(self._count(12, f"arrays of {key!r}"))]
        raise self._corrupt(f"metadata {key!r} is an array of unknown type {item}", key)

    def _strings(self, count: int, key: str) -> list[str]:
        # Vocabularies have 10^5 entries: one local loop over the map instead of a method call per string.
        data, at, size = self.data, self.at, self.size
        length_at = struct.Struct(self.order + "Q").unpack_from
        values = []
        try:
            for _ in range(count):
                (length,) = length_at(data, at)
                at += 8
                end = at + length
                if end > size:
                    raise self._corrupt(f"a string of {key!r} is {length} bytes long, past the end of the file", key)
                values.append(data[at:end])
                at = end
        except struct.error:
            raise self._corrupt(f"the file ends inside {key!r}: truncated?", key) from None
        self.at = at
        return [value.decode("utf-8", "replace") for value in values]

    def _string(self, what: str) -> str:
        length = self._scalar("Q")
        if length > self.size - self.at:
            raise self._corrupt(f"{what}: a string of {length} bytes goes past the end of the file")
        return self._take(length).decode("utf-8", "replace")

    def _count(self, least_bytes: int, what: str) -> int:
        """A count of things that take at least `least_bytes` each, so that a hostile one cannot make us allocate."""
        count = self._scalar("Q")
        if count * least_bytes > self.size - self.at:
            raise self._corrupt(f"{count} {what} cannot fit into the file")
        return int(count)

    def _scalar(self, code: str) -> Any:
        width = struct.calcsize("=" + code)
        return struct.unpack(self.order + code, self._take(width))[0]

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if end > self.size:
            raise self._corrupt(f"the file ends at byte {self.size} inside its header: truncated?")
        raw = self.data[self.at : end]
        self.at = end
        return raw

    def _corrupt(self, message: str, field: str | None = None) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self.path.name}: {message}", field=field or str(self.path))
