"""The calibrated roofline: seconds of a step from its work, the card's peaks and fitted efficiencies.

Each operator takes the longer of its arithmetic and its memory traffic, joined smoothly (the 3-norm of the two); operators
follow one another; launches, collectives and the host add fixed times. Functions accept floats or equally shaped arrays, so
that the same code predicts one run and fits four hundred.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.plan.costs.work import Work
from headrace.spec.hardware import Gpu

Number = Any
"""A float, or an array with one entry per run."""

SMOOTH = 3.0
CEILING = 0.95
"""No kernel reaches more of a datasheet peak; fitted efficiencies approach it smoothly."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """Datasheet ceilings of one card for one weight format: FLOP/s and bytes/s.

    `weight_flops`: of the unit that multiplies the weights; `flops16`: of 16-bit matrices and attention. `weight_bits` of
    that unit (16, 8 or 4).
    """

    weight_flops: Number
    flops16: Number
    bandwidth: Number
    link: Number
    weight_bits: Number


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What is reached of the peaks, and the fixed times, for one engine on one generation of cards.

    `gemm16/8/4`, `experts`, `attention`, `decode_attention`: fraction of peak FLOP/s; `memory`, `expert_memory`, `kv`:
    fraction of peak bandwidth; `link`: of the link. `collective_s` per collective, `layer_s` per layer, `moe_s` per MoE
    layer, `indexer_s` per layer with a sparse-attention indexer,
    `eager_*` the same in steps that are not replayed from a graph, `step_s` per step, `row_s` per sequence and
    step, `prompt_s` per request before its first step. `wave`, `spread`: of the other prompts in flight, how many a
    request that arrives during prefilling waits for: wave x (others) ** spread.
    """

    gemm16: Number
    gemm8: Number
    gemm4: Number
    experts: Number
    attention: Number
    decode_attention: Number
    memory: Number
    expert_memory: Number
    kv: Number
    link: Number
    collective_s: Number
    layer_s: Number
    moe_s: Number
    eager_layer_s: Number
    eager_moe_s: Number
    step_s: Number
    row_s: Number
    prompt_s: Number
    wave: Number
    spread: Number
    indexer_s: Number


BASE = {
    "gemm16": 0.65,
    "gemm8": 0.55,
    "gemm4": 0.4,
    "experts": 0.5,
    "attention": 0.45,
    "decode_attention": 0.35,
    "memory": 0.8,
    "expert_memory": 0.65,
    "kv": 0.7,
    "link": 0.6,
    "collective_s": 8e-6,
    "layer_s": 14e-6,
    "moe_s": 18e-6,
    "eager_layer_s": 3e-4,
    "eager_moe_s": 3e-4,
    "step_s": 6e-4,
    "row_s": 4e-6,
    "prompt_s": 0.02,
    "wave": 1.0,
    "spread": 0.75,
    "indexer_s": 1e-4,
}
"""Starting points and prior means, from public kernel benchmarks and profiles of the engines; the fit moves them."""

ENGINE_TERMS = (
    "gemm",
    "memory_all",
    "layer_s",
    "moe_s",
    "eager_layer_s",
    "eager_moe_s",
    "step_s",
    "row_s",
    "prompt_s",
    "wave",
    "spread",
)
GENERATION_TERMS = ("gemm", "memory_all", "fixed")


FRACTIONS = ("gemm16", "gemm8", "gemm4", "experts", "attention", "decode_attention", "memory", "expert_memory", "kv")
"""Efficiencies below `CEILING`; the other terms are times, counts and the link."""


def terms(name: str, engine: str, generation: str, path: str) -> tuple[str, ...]:
    """The fitted parameters, logarithms of factors, that multiply one efficiency's starting point.

    The fixed time of an MoE layer depends on the kernels that the weight format selects, so it has a term for the pair.
    """
    found = [name]
    if name in FRACTIONS:
        shared = "memory_all" if name in ("memory", "expert_memory", "kv") else "gemm"
        return (name, f"engine.{engine}.{shared}", f"generation.{generation}.{shared}")
    if name in ENGINE_TERMS:
        found.append(f"engine.{engine}.{name}")
    if name in ("layer_s", "moe_s", "step_s", "collective_s"):
        found.append(f"generation.{generation}.fixed")
    if name in ("moe_s", "eager_moe_s"):
        found.append(f"path.{engine}.{path}.moe_s")
    return tuple(found)


def efficiency(parameters: Mapping[str, float], engine: str, generation: str, weights: str) -> Efficiency:
    """Efficiencies of an engine on a generation: the base, times what the fit found for either (1 where it saw none)."""
    path = kernel_path(weights)
    values: dict[str, float] = {}
    for name, start in BASE.items():
        value = start * math.exp(sum(parameters.get(term, 0.0) for term in terms(name, engine, generation, path)))
        values[name] = CEILING * math.tanh(value / CEILING) if name in FRACTIONS else value
    return Efficiency(**values)


def kernel_path(weights: str) -> str:
    """The kernels that a weight format selects: 16bit, fp8, block8 (scales per tile) or 4bit."""
    if weights.startswith("fp8_block"):
        return "block8"
    if weights.startswith(("fp8", "int8")):
        return "fp8"
    return "16bit" if weights in ("bf16", "fp16", "fp32") else "4bit"


def peaks(gpu: Gpu, compute: str) -> Peaks:
    """Ceilings of a card when weights are multiplied in `compute`; a measured bandwidth is not used, the fit covers it."""
    sixteen = gpu.peak_flops("bf16") or gpu.peak_flops("fp16") or gpu.bandwidth
    link = gpu.link_bandwidth or 16e9
    if gpu.link == "pcie":
        link = min(link, 64e9)
    bits = {"fp8": 8, "int8": 8, "fp4": 4}.get(compute, 16)
    return Peaks(gpu.peak_flops(compute) or sixteen, sixteen, gpu.bandwidth, link, bits)


def _longer(a: Number, b: Number) -> Number:
    return (a**SMOOTH + b**SMOOTH) ** (1.0 / SMOOTH)


def operators(w: Work, p: Peaks, e: Efficiency) -> dict[str, Number]:
    """Seconds of each operator of one step."""
    of_peak = (p.weight_bits == 16) * e.gemm16 + (p.weight_bits == 8) * e.gemm8 + (p.weight_bits == 4) * e.gemm4
    gemm = w.gemm_flops / (p.weight_flops * of_peak) + w.gemm16_flops / (p.flops16 * e.gemm16)
    return {
        "gemm": _longer(gemm, w.gemm_bytes / (p.bandwidth * e.memory)),
        "experts": _longer(
            w.expert_flops / (p.weight_flops * of_peak / e.gemm16 * e.experts),
            w.expert_bytes / (p.bandwidth * e.expert_memory),
        ),
        "prefill_attention": w.prefill_attention_flops / (p.flops16 * e.attention),
        "decode_attention": _longer(
            w.decode_attention_flops / (p.flops16 * e.decode_attention), w.decode_attention_bytes / (p.bandwidth * e.kv)
        ),
        "state": _longer(w.state_flops / (p.flops16 * 0.1), w.state_bytes / (p.bandwidth * e.kv)),
        "collectives": w.collectives * e.collective_s + w.link_bytes / (p.link * e.link),
        "launches": w.layers * e.layer_s
        + w.moe_layers * e.moe_s
        + w.indexed_layers * e.indexer_s
        + w.eager_layers * e.eager_layer_s
        + w.eager_moe_layers * e.eager_moe_s,
        "host": e.step_s + w.rows * e.row_s,
    }


def fastest_seconds(w: Work, p: Peaks) -> Number:
    """Seconds that a step takes at the very least: all its arithmetic or all its traffic at the datasheet's peaks, nothing else."""
    arithmetic = (w.gemm_flops + w.expert_flops) / p.weight_flops
    arithmetic += (w.gemm16_flops + w.prefill_attention_flops + w.decode_attention_flops + w.state_flops) / p.flops16
    traffic = (w.gemm_bytes + w.expert_bytes + w.decode_attention_bytes + w.state_bytes) / p.bandwidth
    return (arithmetic + traffic + abs(arithmetic - traffic)) / 2  # the larger, of arrays too


def step_seconds(w: Work, p: Peaks, e: Efficiency) -> Number:
    """Seconds of one step."""
    return sum(operators(w, p, e).values())
