"""Quantized matrices as compressed-tensors checkpoints store them, and the configuration that says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from headrace.base.errors import InvalidInput
from headrace.base.units import ceil_div
from headrace.engine.quant.formats import Format, Packed, known
from headrace.engine.quant.formats._nibbles import unpack
from headrace.engine.quant.formats.fp8 import Float8
from headrace.engine.quant.formats.int8 import Int8
from headrace.engine.quant.formats.integer_groups import IntegerGroups


def writable() -> list[str]:
    """Names of the formats that can be written."""
    return sorted(name for name, f in known().items() if _layout(f) is not None)


def refuse(form: Format, shapes: dict[str, tuple[int, ...]]) -> None:
    """InvalidInput if matrices of these shapes cannot be written in `form`; it names the first."""
    if _layout(form) is None:
        raise InvalidInput(
            f"{form.name} cannot be stored in a compressed-tensors folder",
            field="weights",
            remedy="choose one of: " + ", ".join(writable()),
        )
    if form.spec.scaling != "group":
        return
    for name, shape in shapes.items():
        if shape[-1] % form.spec.group_size:
            fits = _whole(form, {s[-1] for s in shapes.values()})
            raise InvalidInput(
                f"tensor {name!r} has {shape[-1]} inputs, which groups of {form.spec.group_size} do not divide; "
                "compressed-tensors wants whole groups",
                field="weights",
                remedy="use " + " or ".join(fits) if fits else "use a format with a scale per output",
            )


def _whole(form: Format, widths: set[int]) -> list[str]:
    """Names of the same format with other groups, larger first, that divide all `widths`."""
    sizes = [n for n in (128, 64, 32) if not any(width % n for width in widths)]
    others = [form.name.replace(f"_g{form.spec.group_size}", f"_g{n}") for n in sizes]
    return [name for name in others if name in known()]


def tensors(packed: Packed, scales: torch.dtype) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors of one matrix by what follows the module's name; `scales` is the type of its scales."""
    form, (rows, columns) = packed.form, packed.shape
    held = packed.tensors
    if isinstance(form, Int8):
        found = {"weight_scale": held["scales"][:, None].to(scales)}
        if form.quantizes_activations:
            return {**found, "weight": held["codes"]}
        raised = (held["codes"].to(torch.int16) + 128).to(torch.uint8)
        return {**found, "weight_packed": words(raised, 8), "weight_shape": torch.tensor([rows, columns])}
    if isinstance(form, Float8):
        grid = {"tensor": (1,), "row": (rows, 1)}.get(form.spec.scaling, held["scales"].shape)
        return {"weight": held["codes"], "weight_scale": held["scales"].view(grid).to(scales)}
    assert isinstance(form, IntegerGroups)
    bits = form.bits
    codes = unpack(held["codes"], columns) if bits == 4 else held["codes"]
    found = {
        "weight_packed": words(codes, bits),
        "weight_scale": held["scales"].to(scales),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if form.asymmetric:
        count = held["scales"].numel()
        zeros = unpack(held["zeros"][None], count)[0] if bits == 4 else held["zeros"]
        found["weight_zero_point"] = words(zeros.view(rows, -1).t(), bits).t().contiguous()
    return found


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [rows, n] below 2^bits → int32 [rows, ceil(n · bits / 32)], lowest bits first."""
    per = 32 // bits
    rows, count = codes.shape
    padded = F.pad(codes, (0, -count % per)).view(rows, ceil_div(count, per), per).numpy().astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return torch.from_numpy(np.bitwise_or.reduce(padded << shifts, axis=-1).view(np.int32))


def quantization_config(form: Format, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a folder whose linear layers, but for `ignored`, are in `form`."""
    layout = _layout(form)
    assert layout is not None
    strategy = {"tensor": "tensor", "row": "channel", "group": "group", "tile": "block"}[form.spec.scaling]
    asymmetric = form.spec.zero_bits > 0
    weights: dict[str, Any] = {
        "num_bits": int(form.spec.bits),
        "type": form.spec.kind,
        "symmetric": not asymmetric,
        "strategy": strategy,
        "dynamic": False,
        "observer": "minmax",
    }
    if strategy == "group":
        weights["group_size"] = form.spec.group_size
    if strategy == "block":
        weights["block_structure"] = [form.spec.group_size, form.spec.group_size]
    activations = None
    if form.quantizes_activations:
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": layout}},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def _layout(form: Format) -> str | None:
    if isinstance(form, Int8):
        return "int-quantized" if form.quantizes_activations else "pack-quantized"
    if isinstance(form, Float8):
        return "float-quantized"
    return "pack-quantized" if isinstance(form, IntegerGroups) and not form.ordered else None
