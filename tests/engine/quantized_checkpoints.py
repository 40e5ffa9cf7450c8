"""Tiny quantized checkpoints: the matrices of a saved model rewritten in the layout of each quantizer.

compressed-tensors and bitsandbytes pack with their own code; AWQ, GPTQ and block FP8, whose libraries need a GPU, are packed
here element by element as their formats are defined.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

import pytest
import torch
from safetensors.torch import load_file, save_file

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Made:
    """Tensors of one matrix in the checkpoint, and what they stand for in fp32."""

    tensors: dict[str, torch.Tensor]
    values: torch.Tensor


@dataclass
class Kind:
    config: dict
    pack: object
    stored: str = ""
    rest: dict = field(default_factory=dict)


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, rows] of 32 // bits consecutive codes each → int32 [n / per, rows], lowest bits first, one code at a time."""
    per = 32 // bits
    out = torch.zeros(codes.shape[0] // per, codes.shape[1], dtype=torch.int64)
    for i in range(codes.shape[0]):
        out[i // per] |= codes[i].long() << (bits * (i % per))
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def affine(weight: torch.Tensor, bits: int, group_of: torch.Tensor, *, symmetric: bool):
    """Codes [out, in], fp16 scales and whole zero points [out, groups] for groups of inputs given one by one."""
    groups = int(group_of.max()) + 1
    top = 2**bits - 1
    scales, zeros = torch.empty(len(weight), groups), torch.empty(len(weight), groups)
    for g in range(groups):
        part = weight[:, group_of == g]
        if symmetric:
            scales[:, g], zeros[:, g] = part.abs().amax(1) / (top // 2), (top + 1) // 2
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, g] = (high - low) / top
            zeros[:, g] = (-low / scales[:, g]).round()
    scales = scales.half()
    s, z = scales.float()[:, group_of], zeros[:, group_of]
    codes = ((weight / s).round() + z).clamp(0, top)
    return codes, scales, zeros, (codes - z) * s


def in_order(weight: torch.Tensor) -> torch.Tensor:
    return torch.arange(weight.shape[1]) // GROUP


def awq(weight: torch.Tensor, *, by_output: bool = False) -> Made:
    group_of = torch.zeros(weight.shape[1], dtype=torch.int64) if by_output else in_order(weight)
    codes, scales, zeros, values = affine(weight, 4, group_of, symmetric=by_output)

    def interleaved(c: torch.Tensor) -> torch.Tensor:  # [rows, out] → int32 [rows, out / 8]
        out = torch.zeros(c.shape[0], c.shape[1] // 8, dtype=torch.int64)
        for word in range(out.shape[1]):
            for position, column in enumerate(AWQ_ORDER):
                out[:, word] |= c[:, word * 8 + column].long() << (4 * position)
        return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)

    return Made(
        {"qweight": interleaved(codes.t()), "qzeros": interleaved(zeros.t()), "scales": scales.t().contiguous()}, values
    )


def gptq(bits: int = 4, *, symmetric: bool = True, act: bool = False, version: int = 1):
    def pack(weight: torch.Tensor) -> Made:
        group_of = in_order(weight)
        if act:
            shuffled = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
            group_of = group_of[shuffled]
        codes, scales, zeros, values = affine(weight, bits, group_of, symmetric=symmetric)
        stored = (zeros - 1) % 2**bits if version == 1 else zeros
        return Made(
            {
                "qweight": words(codes.t(), bits),
                "qzeros": words(stored, bits).t().contiguous(),
                "scales": scales.t().contiguous(),
                "g_idx": group_of.to(torch.int32),
            },
            values,
        )

    return pack


def compressed(weights: dict, layout: str):
    """Packed by the compressed-tensors library itself."""

    def pack(weight: torch.Tensor) -> Made:
        pytest.importorskip("compressed_tensors", reason="what packs this checkpoint is not installed")
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        args = QuantizationArgs(**weights)
        size = weights.get("group_size") or weight.shape[1]
        if weights["strategy"] == "tensor":
            low, high = weight.amin().view(1), weight.amax().view(1)
        else:
            groups = weight.view(len(weight), -1, size)
            low, high = groups.amin(-1), groups.amax(-1)
        scale, zero = calculate_qparams(low, high, args)
        scale = scale.half().float() if weights["strategy"] == "group" else scale
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
        compressor = BaseCompressor.get_value_from_registry(layout)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        tensors = compressor.compress(dict(state), scheme)
        values = compressor.decompress(dict(tensors), scheme)["weight"]
        return Made({k: v.contiguous() for k, v in tensors.items()}, values.float())

    return pack


def bnb(*, double: bool):
    """Packed by the bitsandbytes library itself."""

    def pack(weight: torch.Tensor) -> Made:
        pytest.importorskip("bitsandbytes", reason="what packs this checkpoint is not installed")
        import bitsandbytes.functional as functional

        codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=double, quant_type="nf4")
        tensors = {"weight": codes} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        return Made(tensors, functional.dequantize_4bit(codes, state).float())

    return pack


def bnb_int8(weight: torch.Tensor) -> Made:
    pytest.importorskip("bitsandbytes", reason="what packs this checkpoint is not installed")
    import bitsandbytes.functional as functional

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        codes, largest, _ = functional.int8_vectorwise_quant(weight.half())
    return Made(
        {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)},
        codes.float() * largest[:, None] / 127,
    )


def fp8(scaling: str):
    def pack(weight: torch.Tensor) -> Made:
        rows, columns = weight.shape
        out = torch.zeros_like(weight)
        codes = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
        tile = {"block": (128, 128), "channel": (1, columns), "tensor": (rows, columns)}[scaling]
        scales = torch.zeros(-(-rows // tile[0]), -(-columns // tile[1]))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = (slice(i * tile[0], (i + 1) * tile[0]), slice(j * tile[1], (j + 1) * tile[1]))
                scales[i, j] = weight[at].abs().max() / 448
                codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
                out[at] = codes[at].float() * scales[i, j]
        name = "weight_scale_inv" if scaling == "block" else "weight_scale"
        return Made({"weight": codes, name: scales.view(()) if scaling == "tensor" else scales}, out)

    return pack


def _ct(weights: dict, layout: str, **more) -> Kind:
    group = {"targets": ["Linear"], "weights": weights, "format": layout, **more}
    return Kind(
        {
            "quant_method": "compressed-tensors",
            "format": layout,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "quantization_status": "compressed",
        },
        compressed(weights, layout),
    )


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
KINDS: dict[str, Kind] = {
    "awq": Kind({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "awq-channel": Kind(
        {"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": False, "version": "gemm"},
        partial(awq, by_output=True),
    ),
    "gptq": Kind(_GPTQ, gptq()),
    "gptq-asym": Kind(_GPTQ | {"sym": False}, gptq(symmetric=False)),
    "gptq-v2-asym": Kind(_GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, gptq(symmetric=False, version=2)),
    "gptq-act": Kind(_GPTQ | {"desc_act": True}, gptq(act=True)),
    "gptq-act-asym": Kind(_GPTQ | {"desc_act": True, "sym": False}, gptq(act=True, symmetric=False)),
    "gptq-8bit": Kind(_GPTQ | {"bits": 8}, gptq(8)),
    "ct-int4": _ct(_INT4 | {"symmetric": True}, "pack-quantized"),
    "ct-int4-asym": _ct(_INT4 | {"symmetric": False}, "pack-quantized"),
    "ct-int4-channel": _ct({"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}, "pack-quantized"),
    "ct-int8": _ct({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}, "int-quantized"),
    "ct-int8-packed": _ct({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}, "pack-quantized"),
    "ct-w8a8": _ct(
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        "int-quantized",
        input_activations={"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True},
    ),
    "ct-fp8-tensor": _ct({"num_bits": 8, "type": "float", "strategy": "tensor"}, "float-quantized"),
    "ct-fp8-channel": _ct({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"),
    "bnb-nf4": Kind(
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
        bnb(double=True),
    ),
    "bnb-nf4-single": Kind(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, bnb(double=False)
    ),
    "bnb-int8": Kind({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8),
    "fp8-block": Kind(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, fp8("block")
    ),
    "fp8-tensor": Kind({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8("tensor")),
    "fbgemm-fp8": Kind({"quant_method": "fbgemm_fp8"}, fp8("channel")),
}


def is_matrix(name: str) -> bool:
    """What quantizers take by default: the projections inside layers, of experts too."""
    return name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))


_PACKED: dict[tuple, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}


def _packed(path, kind: str, skip: tuple) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Stored tensors and their values; the same file is packed once per kind, since that takes longest."""
    key = (blake2b(path.read_bytes()).digest(), kind, skip)
    if key not in _PACKED:
        stored: dict[str, torch.Tensor] = {}
        values: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(path).items():
            module = name.removesuffix(".weight")
            if not is_matrix(name) or module in skip:
                stored[name] = values[name] = tensor
                continue
            packed = KINDS[kind].pack(tensor.float())
            stored |= {f"{module}.{key}": value for key, value in packed.tensors.items()}
            values[name] = packed.values
        _PACKED[key] = stored, values
    stored, values = _PACKED[key]
    return {name: tensor.clone() for name, tensor in stored.items()}, dict(values)


def quantize_folder(folder, kind: str, *, skip=(), change=None, config=None) -> dict[str, torch.Tensor]:
    """Rewrite the checkpoint in `folder` as one of `kind`, but for modules in `skip`; returns all its values in fp32.

    `change(tensors)` damages the stored tensors, `config` the quantization config.
    """
    stored, values = _packed(folder / "model.safetensors", kind, tuple(skip))
    if change is not None:
        change(stored)
    save_file(stored, folder / "model.safetensors")
    path = folder / "config.json"
    table = json.loads(path.read_text())
    table["quantization_config"] = KINDS[kind].config | (config or {})
    path.write_text(json.dumps(table))
    return values
