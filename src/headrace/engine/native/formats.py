"""Which stored types the kernels take as they are."""

from __future__ import annotations

from headrace.spec.gguf import GGUFHeader
from headrace.spec.packing import PACKINGS

_KNOWN = {"f32", "f16", "bf16"} | {name for name in PACKINGS if name.startswith("q")}


def unknown_types(header: GGUFHeader) -> str | None:
    """The first tensor of a type that has no packed form, in one line, or None."""
    for tensor in header.tensors.values():
        if tensor.type.name not in _KNOWN:
            return f"tensor {tensor.name} has type {tensor.type.name}, which has no packed form"
    return None
