"""How the native CPU backend stores weights, and the bytes that takes: part of the one arithmetic (`spec.accounting`).

A matrix is cut into tiles of 16 outputs and groups of 32 inputs; a group's codes are preceded by their scales. The same
layout is written down for the kernels in `native/src/packed.h`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Literal

import msgspec

from headrace.base.errors import InvalidInput, UnsupportedModel
from headrace.base.units import ceil_div
from headrace.spec.model import Attention, DenseMLP, ModelSpec
from headrace.spec.tensors import Weight, weights

if TYPE_CHECKING:
    from headrace.spec.gguf import GGUFHeader
    from headrace.spec.safetensors import StoredTensor

BLOCK_KINDS = {f"int{bits}_g{size}": kind for bits, kind in ((4, "q4_0"), (8, "q8_0")) for size in (32, 64, 128)}
"""Formats of checkpoints whose groups are, without loss, blocks of a ggml type: symmetric, with scales in fp16."""

TILE = 16
GROUP = 32
SUPER = 8
ALIGNMENT = 64
"""Every packed matrix starts at a multiple of this: a line of codes must not straddle two cache lines."""

Role = Literal["matrix", "table", "router"]
"""What a matrix is for: `table` is the embedding or the output head, `router` chooses experts and stays in floats."""


class Packing(msgspec.Struct, frozen=True):
    """One packed format: bytes of codes, of scales per (tile, group) and of scales per 8 groups of a tile.

    `codes`, `scales` and `zero` are the numbers that native code knows the format by.
    """

    name: str
    codes: int
    scales: int
    zero: int
    bits: int
    code_bytes: int
    scale_bytes: int = 0
    super_bytes: int = 0

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a matrix; outputs are padded to whole tiles, inputs to whole groups."""
        groups = ceil_div(inputs, GROUP)
        tile = groups * (self.code_bytes + self.scale_bytes) + ceil_div(groups, SUPER) * self.super_bytes
        return ceil_div(outputs, TILE) * tile


PACKINGS: dict[str, Packing] = {
    p.name: p
    for p in (
        Packing("fp32", 0, 0, 0, 32, 2048),
        Packing("fp16", 1, 0, 0, 16, 1024),
        Packing("bf16", 2, 0, 0, 16, 1024),
        Packing("q4_0", 3, 1, 8, 4, 256, 32),
        Packing("q4_1", 3, 2, 0, 4, 256, 64),
        Packing("q5_0", 4, 1, 16, 5, 320, 32),
        Packing("q5_1", 4, 2, 0, 5, 320, 64),
        Packing("q8_0", 6, 1, 0, 8, 512, 32),
        Packing("q4_k", 3, 3, 0, 4, 256, 32, 64),
        Packing("q5_k", 4, 3, 0, 5, 320, 32, 64),
        Packing("q6_k", 5, 4, 32, 6, 384, 32, 32),
    )
}

_PLAIN = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
CHOICES = {
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "q8_0",
    "q8_0": "q8_0",
    "int4": "q4_1",
    "q4": "q4_1",
}

WEIGHTS = ("auto", *CHOICES)
"""What `weights` may be: as stored, or every matrix converted when it is loaded. `int8` is a scale per group of 32 inputs,
`int4` a scale and a minimum; embedding and head are then kept in 8 bits, routers in floats."""


def packing(stored: str, wanted: str, role: Role) -> Packing:
    """The format in which a matrix stored as ggml type `stored` is packed when the user asked for `wanted`."""
    natural = _PLAIN.get(stored, stored)
    if natural not in PACKINGS:
        raise UnsupportedModel(
            f"weights of type {stored} have no packed form", field="weights", remedy="known: " + ", ".join(PACKINGS)
        )
    if wanted not in WEIGHTS:
        raise InvalidInput(
            f"cannot use weights {wanted!r}", field="weights", remedy="choose one of: " + ", ".join(WEIGHTS)
        )
    if role == "router":
        return PACKINGS[natural if natural in _PLAIN.values() else "fp32"]
    if wanted == "auto":
        return PACKINGS[natural]
    chosen = PACKINGS[CHOICES[wanted]]
    if chosen.bits == 4 and role == "table":
        chosen = PACKINGS["q8_0"]
    # What has as many bits already is kept as it is: quantizing it once more would only lose.
    same = chosen.scales != 0 and PACKINGS[natural].bits == chosen.bits
    return PACKINGS[natural] if same else chosen


def aligned(count: int) -> int:
    return ceil_div(count, ALIGNMENT) * ALIGNMENT


def packed_weight_bytes(
    spec: ModelSpec,
    wanted: str,
    header: GGUFHeader | None = None,
    stored: Mapping[str, StoredTensor] | None = None,
) -> int:
    """Bytes of all weights as the native backend allocates them: matrices packed and aligned, vectors in fp32.

    Each matrix packs from the type it has in its file: `header` is that of a GGUF file, `stored` the tensors of safetensors
    files (`headrace.spec.safetensors`). Without either, every matrix is taken to be stored in the checkpoint's precision; of
    a quantized checkpoint, those of the parts that it leaves alone in its plain one.
    """
    if header is not None:
        return sum(_file_tensors(spec, wanted, header))
    blocks = BLOCK_KINDS.get(spec.checkpoint_precision)
    kinds = _named_kinds(spec, blocks) if stored is None else _stored_kinds(spec, stored, blocks)
    total = 0
    for w in weights(spec, mtp=False):
        if len(w.shape) == 1:
            total += w.copies * 4 * w.shape[0]
        else:
            for _ in range(w.copies):
                total += aligned(packing(kinds(w), wanted, _role(w.role)).nbytes(*w.shape))
    return total


def _plain_kind(precision: str) -> str:
    """The ggml type of plain matrices of a precision."""
    return {"fp32": "f32", "fp16": "f16"}.get(precision, "bf16")


def _named_kinds(spec: ModelSpec, blocks: str | None) -> Callable[[Weight], str]:
    """The ggml type of a matrix by what the configuration says."""
    from headrace.spec.accounting import UNQUANTIZED_PARTS

    unpacked = spec.checkpoint_precision if blocks is None else spec.plain_precision
    plain = _plain_kind(unpacked)
    kept = UNQUANTIZED_PARTS | frozenset(spec.unquantized_parts)

    def kind(w: Weight) -> str:
        return blocks if blocks and w.linear and not kept & {w.role, f"{w.role}@{w.layer}"} else plain

    return kind


_LAYER = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d+)\.")
_PLAIN_DTYPES = {"F64": "f32", "F32": "f32", "F16": "f16", "BF16": "bf16"}


def _stored_kinds(spec: ModelSpec, stored: Mapping[str, StoredTensor], blocks: str | None) -> Callable[[Weight], str]:
    """The ggml type of a matrix by the files' own headers; each call takes one matrix of its part, layer and shape.

    Which of several alike is which does not matter, since they pack to the same bytes. A quantized checkpoint has no plain
    tensor for a quantized matrix, so what is not found is one.
    """
    from headrace.spec.quantization import module_part

    plain: dict[tuple[str, int, tuple[int, ...]], list[str]] = {}
    for name, tensor in stored.items():
        kind = _PLAIN_DTYPES.get(tensor.dtype)
        if kind is None or not name.endswith(".weight") or len(tensor.shape) < 2:
            continue
        module = name.removesuffix(".weight")
        found = _LAYER.search(module)
        layer, part = int(found[1]) if found else -1, module_part(module) or "extra"
        *copies, outputs, inputs = tensor.shape
        for rows in _split_rows(spec, part, layer, outputs, inputs):
            plain.setdefault((part, layer, (rows, inputs)), []).extend([kind] * prod(copies))
    missing = blocks or _plain_kind(spec.checkpoint_precision)

    def kind_of(w: Weight) -> str:
        alike = plain.get((w.role, w.layer, w.shape))
        return alike.pop() if alike else missing

    return kind_of


def _split_rows(spec: ModelSpec, part: str, layer: int, outputs: int, inputs: int) -> tuple[int, ...]:
    """Outputs of the matrices that a stored one is split into: projections that are stored below each other, else itself.

    No other matrix of a layer has the shape of queries, keys and values together, or of gate and up.
    """
    if not 0 <= layer < len(spec.layers) or inputs != spec.hidden_size:
        return (outputs,)
    mixer, mlp = spec.layers[layer].mixer, spec.layers[layer].mlp
    if part == "attention" and isinstance(mixer, Attention):
        each = (mixer.num_heads * mixer.head_dim, *(2 * (mixer.num_kv_heads * mixer.head_dim,)))
        return each if sum(each) == outputs else (outputs,)
    if part == "mlp" and isinstance(mlp, DenseMLP) and outputs == 2 * mlp.intermediate:
        return (mlp.intermediate, mlp.intermediate)
    return (outputs,)


def _role(part: str) -> Role:
    if part in ("embedding", "lm_head"):
        return "table"
    return "router" if part == "router" else "matrix"


def _file_tensors(spec: ModelSpec, wanted: str, header: GGUFHeader) -> Iterator[int]:
    from headrace.spec.accounting import gguf_part

    for tensor in header.tensors.values():
        part = gguf_part(tensor.name)
        if part == "extra" or (part == "lm_head" and spec.tied_embeddings):
            continue
        if len(tensor.shape) == 1:
            yield 4 * tensor.shape[0]
            continue
        *copies, outputs, inputs = tensor.shape
        form = packing(tensor.type.name, wanted, _role(part))
        found = _LAYER.search(tensor.name)
        for rows in _split_rows(spec, part, int(found[1]) if found else -1, outputs, inputs):
            yield prod(copies) * aligned(form.nbytes(rows, inputs))
