"""Number formats of weights and of the KV cache, with the exact bytes they take, scales and zero points included.

Weights precision, KV precision and activation precision are three settings; nothing here derives one from another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace

from headrace.base.errors import InvalidInput
from headrace.base.units import ceil_div
from headrace.spec.ggml import GGML_TYPES_BY_NAME

T = TypeVar("T")
Scaling = Literal["none", "tensor", "row", "group", "tile", "flat", "block"]


class Precision(msgspec.Struct, frozen=True):
    """How a weight tensor `[out, in]` is stored.

    `bits` per element, packed along the input dimension (a row is padded to whole bytes). `scaling` says what shares a
    scale: the `tensor`, a `row` (output channel), a `group` of `group_size` inputs of one row, a `group_size` x `group_size`
    `tile`, a run of `group_size` elements of the `flat`tened tensor, or a ggml `block` whose scale is inside `bits`.
    `scale_bytes` per scale, `zero_bits` per zero point (packed), `scale_group`: scales are themselves quantized in groups of
    this many with one fp32 each (double quantization), `tensor_bytes`: constant per tensor, `column_bytes`: per input (the
    order of inputs whose groups are not consecutive, as GPTQ's act order leaves them).
    """

    name: str
    bits: float
    kind: Literal["float", "int", "codebook"]
    scaling: Scaling = "none"
    group_size: int = 0
    scale_bytes: float = 0
    zero_bits: int = 0
    scale_group: int = 0
    tensor_bytes: int = 0
    column_bytes: int = 0

    @property
    def quantized(self) -> bool:
        """Whether values were rounded to scales; plain floats, also 8-bit ones without a scale, are not."""
        return self.scaling != "none"

    def nbytes(self, shape: Sequence[int]) -> int:
        """Exact bytes of a tensor of `shape`, whose last dimension is the input; leading ones are folded into rows.

        InvalidInput if a ggml block does not divide the last dimension.
        """
        if not shape:
            shape = (1,)
        cols = shape[-1]
        rows = prod(shape[:-1])
        if self.scaling == "block":
            if cols % self.group_size:
                raise InvalidInput(
                    f"{self.name} needs rows of a multiple of {self.group_size} elements, got {cols}", field="precision"
                )
            return round(rows * cols * self.bits) // 8
        payload = (
            ceil_div(rows * cols * int(self.bits), 8)
            if self.scaling == "flat"
            else rows * ceil_div(cols * int(self.bits), 8)
        )
        scales = self._scales(rows, cols)
        zeros = ceil_div(scales * self.zero_bits, 8)
        total = payload + int(scales * self.scale_bytes) + zeros + (self.tensor_bytes if rows * cols else 0)
        total += cols * self.column_bytes if rows else 0
        if self.scale_group:
            total += ceil_div(scales, self.scale_group) * 4
        return total

    def _scales(self, rows: int, cols: int) -> int:
        match self.scaling:
            case "none" | "block":
                return 0
            case "tensor":
                return 1
            case "row":
                return rows
            case "group":
                return rows * ceil_div(cols, self.group_size)
            case "tile":
                return ceil_div(rows, self.group_size) * ceil_div(cols, self.group_size)
            case "flat":
                return ceil_div(rows * cols, self.group_size)


def _int_groups() -> list[Precision]:
    rows = []
    for bits in (4, 8):
        for size in (32, 64, 128):
            rows.append(Precision(f"int{bits}_g{size}", bits, "int", "group", size, scale_bytes=2))
            rows.append(Precision(f"int{bits}_g{size}_asym", bits, "int", "group", size, scale_bytes=2, zero_bits=bits))
    rows += [replace(p, name=f"{p.name}_act", column_bytes=4) for p in rows]
    return rows


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision("fp32", 32, "float"),
        Precision("fp16", 16, "float"),
        Precision("bf16", 16, "float"),
        Precision("fp8_e4m3", 8, "float", "tensor", scale_bytes=4),
        Precision("fp8_channel", 8, "float", "row", scale_bytes=4),
        Precision("fp8_block128", 8, "float", "tile", 128, scale_bytes=4),
        Precision("int8", 8, "int", "row", scale_bytes=4),
        Precision("int4", 4, "int", "row", scale_bytes=4),
        *_int_groups(),
        Precision("nf4", 4, "codebook", "flat", 64, scale_bytes=1, scale_group=256, tensor_bytes=4),
        Precision("nf4_single", 4, "codebook", "flat", 64, scale_bytes=4),
        Precision("mxfp4", 4, "float", "group", 32, scale_bytes=1),
        Precision("nvfp4", 4, "float", "group", 16, scale_bytes=1, tensor_bytes=4),
        *(
            Precision(t.name, t.bits_per_element, "int", "block", t.block_elements)
            for t in GGML_TYPES_BY_NAME.values()
            if t.block_elements > 1 and t.name not in ("mxfp4", "nvfp4")
        ),
    )
}

FLOAT_ALIASES: dict[str, str] = {
    "float32": "fp32",
    "f32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "f16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
}

ALIASES: dict[str, str] = FLOAT_ALIASES | {
    "fp8": "fp8_e4m3",
    "f8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "fp8_per_tensor": "fp8_e4m3",
    "fp8_per_channel": "fp8_channel",
    "fp8_dynamic": "fp8_channel",
    "fp8_block": "fp8_block128",
    "w8a8": "int8",
    "w8a16": "int8",
    "int8_channel": "int8",
    "int4_channel": "int4",
    "int4_sym": "int4_g128",
    "int4_asym": "int4_g128_asym",
    "w4a16": "int4_g128",
    "gptq": "int4_g128",
    "awq": "int4_g128_asym",
    "nf4_double": "nf4",
    "fp4": "nvfp4",
}


def _find(name: str, formats: Mapping[str, T], aliases: Mapping[str, str], what: str, field: str) -> T:
    """The format called `name`: case, `-` and `_` do not matter. InvalidInput lists all."""
    key = name.strip().lower().replace("-", "_").removeprefix("torch.")
    found = formats.get(aliases.get(key, key))
    if found is None:
        raise InvalidInput(
            f"unknown {what} precision {name!r}", field=field, remedy="choose one of: " + ", ".join(formats)
        )
    return found


def precision(name: str) -> Precision:
    """The weight format called `name` (case, `-` and `_` do not matter, common aliases are known); InvalidInput lists all."""
    return _find(name, PRECISIONS, ALIASES, "weights", "precision")


class KVPrecision(msgspec.Struct, frozen=True):
    """How keys and values are cached: one head's vector of one token is `bits` per element plus `head_bytes` of scales.

    `fp8` has one scale per tensor, outside the cache. `int8` keeps an fp16 scale, `int4` an fp16 scale and an fp16 minimum,
    per token and head. With a `key_group`, keys have these per channel instead, for so many neighbouring tokens together.
    MLA latents count as one head's values.

    With a `scale_group`, so many neighbouring elements of a vector share `scale_bytes`: 16 of NVFP4 an E4M3 scale (a further one per
    tensor lies outside the cache), 32 of a ggml block its fp16 scale (and minimum). `latent_only`: a layout of MLA latents
    (`accounting.latent_token_bytes`), which heads' keys and values have no use for.
    """

    name: str
    bits: int
    head_bytes: int = 0
    key_group: int = 0
    scale_group: int = 0
    scale_bytes: int = 0
    latent_only: bool = False

    def token_bytes(self, key_dim: int, value_dim: int) -> int:
        """Bytes of one head's key and value of a token; of a key's group, the token's share."""
        if self.latent_only:
            raise InvalidInput(
                f"{self.name} stores the latents of MLA, not keys and values of heads", field="kv", remedy="take fp8"
            )
        if not self.key_group:
            return self.vector_bytes(key_dim) + self.vector_bytes(value_dim)
        key = ceil_div(key_dim * self.bits, 8) + ceil_div(key_dim * self.head_bytes, self.key_group)
        return key + self.vector_bytes(value_dim)

    def vector_bytes(self, dim: int) -> int:
        """Bytes of one head's vector of `dim` elements; 0 for a vector that is not stored."""
        if dim == 0:
            return 0
        scales = ceil_div(dim, self.scale_group) * self.scale_bytes if self.scale_group else 0
        return ceil_div(dim * self.bits, 8) + scales + self.head_bytes


KV_PRECISIONS: dict[str, KVPrecision] = {
    p.name: p
    for p in (
        KVPrecision("fp32", 32),
        KVPrecision("fp16", 16),
        KVPrecision("bf16", 16),
        KVPrecision("fp8", 8),
        KVPrecision("int8", 8, head_bytes=2),
        KVPrecision("int4", 4, head_bytes=4, key_group=32),
        KVPrecision("nvfp4", 4, scale_group=16, scale_bytes=1),
        KVPrecision("fp8_ds_mla", 8, latent_only=True),
        KVPrecision("q8_0", 8, scale_group=32, scale_bytes=2),
        KVPrecision("q5_1", 5, scale_group=32, scale_bytes=4),
        KVPrecision("q5_0", 5, scale_group=32, scale_bytes=2),
        KVPrecision("q4_1", 4, scale_group=32, scale_bytes=4),
        KVPrecision("q4_0", 4, scale_group=32, scale_bytes=2),
        KVPrecision("iq4_nl", 4, scale_group=32, scale_bytes=2),
    )
}

KV_ALIASES: dict[str, str] = FLOAT_ALIASES | {
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_inc": "fp8",
    "float8_e4m3fn": "fp8",
    "fp4": "nvfp4",
    "fp4_e2m1": "nvfp4",
    "q8": "int8",
    "q4": "int4",
}


def kv_precision(name: str) -> KVPrecision:
    """The KV-cache format called `name`; InvalidInput lists all. `auto` must be resolved by the caller."""
    return _find(name, KV_PRECISIONS, KV_ALIASES, "KV", "kv_precision")
