"""Activation-aware scaling (AWQ, arXiv:2306.00978): inputs with large activations get finer steps.

Multiplying column j of a matrix by s_j and dividing its input by s_j changes nothing before rounding; after it, the error at
input j is divided by s_j. s = (mean |x|)^a, and a is searched on a grid for the least error of the layer's outputs. The
division is folded into what comes before: a norm's weights, or the rows of the matrix whose outputs these inputs are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.engine.quant.formats import Format, Packed
from headrace.engine.quant.methods._contract import Inputs, LayerWork, Settings


class ActivationAware:
    calibrated = True

    def refuse(self, form: Format, *, sparse: bool) -> str | None:
        return "awq does not scale the inputs of experts; use gptq or rtn" if sparse else None

    def quantize(self, work: LayerWork, form: Format, settings: Settings) -> dict[str, Packed]:
        for matrices, fold in _pairs(work):
            scales = _search({m: work.tensors[m] for m in matrices}, work.inputs[matrices[0]], form, settings.grid)
            for m in matrices:
                work.tensors[m] = work.tensors[m] * scales
            fold(scales)
            work.inputs[matrices[0]].divide(scales)  # matrices of one input share what was seen
        return {name: form.quantize(work.tensors[name], name) for name in work.matrices}


def _pairs(work: LayerWork) -> list[tuple[list[str], Callable[[torch.Tensor], None]]]:
    """Matrices of one input, with what divides that input by scales. Values that several heads share cannot be scaled for
    each, so the output projection is scaled only where every head has its own."""
    n = work.names

    def at(pattern: str) -> str:
        return f"{pattern.format(i=work.index)}.weight"

    qkv = [at(n.q), at(n.k), at(n.v)] if n.qkv is None else [at(n.qkv)]
    gate_up = [at(n.gate), at(n.up)] if n.gate_up is None else [at(n.gate_up)]
    found = [(qkv, _norm(work, at(n.attn_norm)))]
    values, out = (at(n.v), at(n.o)) if n.qkv is None else ("", "")
    if values in work.tensors and len(work.tensors[values]) == work.tensors[out].shape[1]:
        found.append(([out], _rows(work, values)))
    found.append(([m for m in gate_up if m in work.tensors], _norm(work, at(n.mlp_norm))))
    if n.gate_up is None and at(n.gate) in work.tensors:  # the product with the gate is linear in what `up` gives
        found.append(([at(n.down)], _rows(work, at(n.up))))
    kept = []
    for matrices, fold in found:
        # Scaling what is not rounded would cost a rounding for nothing.
        if all(m in work.matrices for m in matrices):
            kept.append((matrices, fold))
    return kept


def _norm(work: LayerWork, name: str) -> Callable[[torch.Tensor], None]:
    def fold(scales: torch.Tensor) -> None:
        weight = work.tensors[name]
        work.tensors[name] = (weight + 1) / scales - 1 if work.norm_offset else weight / scales

    return fold


def _rows(work: LayerWork, name: str) -> Callable[[torch.Tensor], None]:
    def fold(scales: torch.Tensor) -> None:
        work.tensors[name] = work.tensors[name] / scales[:, None]
        bias = name.removesuffix("weight") + "bias"
        if bias in work.tensors:
            work.tensors[bias] = work.tensors[bias] / scales

    return fold


def _search(matrices: dict[str, torch.Tensor], inputs: Inputs, form: Format, grid: int) -> torch.Tensor:
    """The scales [in] of least error; all ones (no scaling) are among them."""
    magnitude = (inputs.magnitude / max(inputs.count, 1)).clamp_(min=1e-6)
    best, least = torch.ones_like(magnitude), float("inf")
    for step in range(grid):
        scales = magnitude.pow(step / grid)
        scales = (scales / (scales.max() * scales.min()).sqrt()).clamp_(1e-4, 1e4)
        loss = sum(
            inputs.loss(form.quantize(m * scales, name).dequantize() / scales - m) for name, m in matrices.items()
        )
        if loss < least:
            best, least = scales, loss
    return best


METHOD = ActivationAware()
