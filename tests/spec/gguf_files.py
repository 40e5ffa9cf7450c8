"""A writer of small GGUF files for tests, independent of the reader under test."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.spec.ggml import GGML_TYPES_BY_NAME

Tensor = tuple[str, tuple[int, ...], str]


def packed(value: Any, order: str = "<") -> bytes:
    """Type code and payload of a metadata value: int → u32, float → f32, bool, str, lists of these."""
    match value:
        case bool():
            return struct.pack(order + "I?", 7, value)
        case int():
            return struct.pack(order + "II", 4, value)
        case float():
            return struct.pack(order + "If", 6, value)
        case str():
            return struct.pack(order + "I", 8) + text(value, order)
        case list():
            items = [packed(v, order) for v in value]
            code = items[0][:4] if items else struct.pack(order + "I", 4)
            return (
                struct.pack(order + "I", 9)
                + code
                + struct.pack(order + "Q", len(items))
                + b"".join(i[4:] for i in items)
            )
    raise TypeError(value)


def text(value: str, order: str = "<") -> bytes:
    raw = value.encode()
    return struct.pack(order + "Q", len(raw)) + raw


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Sequence[Tensor], *, version: int = 3, order: str = "<", alignment: int = 32
) -> bytes:
    """A whole file; tensors are given in numpy order of dimensions and hold zeros."""
    head = b"GGUF" + struct.pack(order + "IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += text(key, order) + packed(value, order)
    offset, data = 0, b""
    for name, shape, kind in tensors:
        info = GGML_TYPES_BY_NAME[kind]
        size = info.block_bytes
        for n in shape[:-1]:
            size *= n
        size = size * shape[-1] // info.block_elements
        head += text(name, order) + struct.pack(order + "I", len(shape))
        head += b"".join(struct.pack(order + "Q", n) for n in reversed(shape))
        head += struct.pack(order + "IQ", info.id, offset)
        padded = -(-size // alignment) * alignment
        data += bytes(padded)
        offset += padded
    return head + bytes(-len(head) % alignment) + data


def write(path: Path, metadata: Mapping[str, Any], tensors: Sequence[Tensor], **kwargs: Any) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors, **kwargs))
    return path
