"""Quantized matrices from the layout of their format to the one that the kernels stream; no bit is lost."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.engine.kernels.quantized import (
    BY_EXPONENT,
    BY_GROUP,
    BY_NESTED,
    BY_PART,
    BY_ROW,
    CHUNK,
    NESTED,
    QuantMatrix,
)
from headrace.engine.kernels.unpack import FP8, INT4, INT8, MXFP4, MXFP4_BITS, NF4_CODES
from headrace.engine.quant.formats import Packed
from headrace.spec.precision import Precision


def unfit(form: Precision, rows: Sequence[int], columns: int) -> str | None:
    """Why matrices of this format with so many outputs each, joined, are not in the kernels' reach; None if they are."""
    if form.column_bytes:
        return "its groups are not of neighbouring inputs"
    if columns % CHUNK:
        return f"{columns} inputs are not a multiple of {CHUNK}"
    if form.scaling in ("group", "flat") and columns % form.group_size:
        return f"{columns} inputs are not whole groups of {form.group_size}"
    if form.scaling == "tile" and (columns % form.group_size or any(n % form.group_size for n in rows[:-1])):
        return f"tiles of {form.group_size} cross from one matrix into the next"
    if form.zero_bits and any(n % 2 for n in rows):
        return "zero points of an odd number of outputs share a byte"
    if form.scale_group and any(n * columns // form.group_size % NESTED.value for n in rows[:-1]):
        return f"runs of {NESTED.value} scales cross from one matrix into the next"
    if len(rows) > 3:
        return "more than three matrices are joined"
    return None


def repacked(parts: Sequence[Packed]) -> QuantMatrix:
    """The matrices joined by their outputs, which `unfit` must not object to. The parts' tensors are not kept."""
    form = parts[0].form.spec
    rows, columns = sum(p.rows for p in parts), parts[0].shape[-1]
    if form.name.startswith("nf4"):
        kind, scaling = NF4_CODES, BY_NESTED if form.scale_group else BY_GROUP
    elif form.name == "mxfp4":
        kind, scaling = MXFP4, BY_EXPONENT
    elif form.kind == "float":
        kind, scaling = FP8, {"tensor": BY_PART, "row": BY_ROW}.get(form.scaling, BY_GROUP)
    else:
        kind, scaling = INT4 if form.bits == 4 else INT8, BY_ROW if form.scaling == "row" else BY_GROUP
    codes = [_codes(p, kind.value) for p in parts]
    # Of permuted codes the outputs are the second dimension, of others the first.
    joined = torch.cat(codes, 1 if form.bits == 4 else 0).contiguous() if len(codes) > 1 else codes[0]
    more: dict[str, torch.Tensor] = {}
    shared = 1
    if form.scaling in ("row", "tensor"):
        scales = torch.cat([p.tensors["scales"].view(-1) for p in parts])
    else:
        if form.scaling == "tile":
            shared = form.group_size
        per_part = [p.tensors["scales"].view(-(-p.rows // shared), -1) for p in parts]
        scales = torch.cat(per_part).t().contiguous()
    if form.zero_bits:
        flat = [_zeros(p) for p in parts]
        zeros = torch.cat(flat).t().contiguous().view(-1)
        more["zeros"] = zeros[0::2] | zeros[1::2] << 4 if form.zero_bits == 4 else zeros
    if form.scale_group:
        more["nested"] = torch.cat([p.tensors["nested"] for p in parts])
        more["offsets"] = torch.cat([p.tensors["offset"] for p in parts])
    begins = [sum(p.rows for p in parts[: i + 1]) for i in range(len(parts) - 1)] + [1 << 30, 1 << 30]
    return QuantMatrix(
        parts[0].form.name, kind.value, scaling.value, form.group_size if form.scaling not in ("row", "tensor") else 0,
        (rows, columns), joined, scales, shared=shared, parts=(begins[0], begins[1]), **more,
    )  # fmt: skip


def _codes(packed: Packed, kind: int) -> torch.Tensor:
    rows, columns = packed.rows, packed.shape[-1]
    stored = packed.tensors["codes"]
    if kind == FP8.value:
        return stored
    if kind == INT8.value:
        # Groups count from 0 with the zero in the middle; as signed numbers their highest bit is the other way round.
        return stored if stored.dtype == torch.int8 else (stored ^ 128).view(torch.int8)
    stored = stored.view(rows, columns // 2)
    low, high = stored & 15, stored >> 4
    pair = (high, low) if kind == NF4_CODES.value else (low, high)
    chunk = CHUNK if columns % (2 * CHUNK) or packed.form.spec.group_size == 32 else 2 * CHUNK
    codes = torch.stack(pair, -1).view(rows, columns // chunk, 2, chunk // 2)
    if kind == MXFP4.value:
        return _mxfp4_bits(codes).transpose(0, 1).contiguous()
    return (codes[:, :, 0] | codes[:, :, 1] << 4).transpose(0, 1).contiguous()


def _zeros(packed: Packed) -> torch.Tensor:
    """uint8 [outputs, groups]."""
    stored, groups = packed.tensors["zeros"], packed.tensors["scales"].shape[1]
    if packed.form.spec.zero_bits == 4:
        stored = torch.stack([stored & 15, stored >> 4], -1).view(-1)
    return stored.view(packed.rows, groups)


def _mxfp4_bits(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [rows, chunks, chunk / 2] of codes [rows, chunks, 2, chunk / 2] as `headrace.engine.kernels.unpack` wants them."""
    rows, chunks, _, width = codes.shape
    # By half of a chunk, word, pair of a word, half of a word.
    codes = codes.view(rows, chunks, 2, width // 4, 2, 2)
    both = torch.zeros(rows, chunks, width // 4, 2, dtype=torch.int32, device=codes.device)
    for i, (sign, size) in enumerate(MXFP4_BITS):
        code = codes[:, :, i // 2, :, i % 2].int()
        both |= code >> 3 << sign | (code & 7) << size
    return torch.stack([both & 255, both >> 8], -1).to(torch.uint8).view(rows, chunks, width)
