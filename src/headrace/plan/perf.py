"""Latency, throughput and dollars of one deployment under one load."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec

from headrace.plan.calibration import METRICS, Band, Calibration, CalibrationSet, Tier, group_names, key_of, shipped
from headrace.plan.closed_loop import closed_loop
from headrace.plan.costs.roofline import Efficiency, efficiency, fastest_seconds, operators
from headrace.plan.deployment import Deployment, Inputs, describe, resolve, trained_context_note
from headrace.plan.economics import usd_per_million
from headrace.plan.neighbours import TP, campaign_name, position, shift
from headrace.plan.workload import COMPUTE, Traffic, traffic
from headrace.spec import hardware
from headrace.spec.hardware import Gpu
from headrace.spec.prediction import Figure, Grade, Prediction

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Requests in flight that a picture of one deployment shows."""


class Performance(msgspec.Struct, frozen=True):
    """Predicted means of a closed loop at the stated concurrency.

    `running`/`waiting`: requests inside the engine and outside, per instance. `decode_ms`/`prefill_ms`: milliseconds of each
    operator in one decode step and one prefill step, before offsets. `fits`: one request fits in memory; if not, the times
    are what the arithmetic alone would give.
    """

    subject: str
    ttft_ms: Figure
    tpot_ms: Figure
    output_tokens_per_s_per_gpu: Figure
    output_tokens_per_s: Figure
    usd_per_million_output_tokens: Figure | None
    usd_per_million_input_tokens: Figure | None
    running: int
    waiting: int
    fits: bool
    decode_ms: dict[str, float]
    prefill_ms: dict[str, float]
    tokens_per_step: float
    notes: tuple[str, ...]


def perf(inputs: Inputs, calibration: CalibrationSet | None = None) -> Performance:
    """Predict one run. A run that the calibration was fitted on is predicted as if its model family had never been measured."""
    chosen = calibration or shipped()
    d = resolve(inputs)
    family = chosen.rows.get(key_of(d))
    if family is not None and family in chosen.folds:
        fold = chosen.folds[family]
        return predict(d, fold.calibration, fold.tier, "fitted")
    return perf_deployment(d, chosen)


def perf_deployment(d: Deployment, calibration: CalibrationSet | None = None) -> Performance:
    """`perf` for an already resolved deployment, with everything that was measured."""
    chosen = calibration or shipped()
    seen = f"{d.model.family}|{d.engine}" in chosen.families
    generations = {name.split(".")[1] for name in chosen.main.parameters if name.startswith("generation.")} | {"hopper"}
    grade: Grade = "fitted" if d.gpu.generation in generations else "guess"
    if d.engine not in {name.split("|")[1] for name in chosen.families}:
        grade = "guess"
    tier = _tier(d, chosen) if seen else chosen.unseen
    slowest = None
    if not chosen.main.runs.get(campaign_name(d.model.family, d)):
        slowest = _on_better_cards(d, chosen.main, tier, grade)
    return predict(d, chosen.main, tier, grade, slowest)


def _on_better_cards(d: Deployment, c: Calibration, tier: Tier, grade: Grade) -> Figure | None:
    """The longest time per token that the same requests are predicted to have on a card of the same chip that is better.

    Fitted offsets of a card follow the few campaigns measured there; alone they would let a card outrun a better one.
    """
    better = [g for g in hardware.catalog().values() if _outdoes(g, d.gpu)]
    running = traffic(d).running * d.replicas if better else 0
    times = []
    for gpu in better:
        there = resolve(msgspec.structs.replace(d.inputs, gpu=gpu.id, concurrency=running))
        times.append(predict(there, c, tier, grade).tpot_ms)
    return max(times, key=lambda figure: figure.value, default=None)


def _outdoes(a: Gpu, b: Gpu) -> bool:
    """Whether a card is another's chip with faster memory, no less of it and no slower links, as the H200 is the H100's."""
    same_chip = a.generation == b.generation and all(a.peak_flops(unit) == b.peak_flops(unit) for unit in COMPUTE)
    no_less = a.memory_bytes >= b.memory_bytes and a.link_bandwidth >= b.link_bandwidth
    return same_chip and a.bandwidth > b.bandwidth and no_less


def _tier(d: Deployment, c: CalibrationSet) -> Tier:
    """Intervals by what was measured of a known family on this engine: a run of this very cell, something on this card, or neither."""
    if not any(name.startswith(f"{d.model.family}|{d.engine}|{d.gpu.id}|") for name in c.main.runs):
        return c.unseen
    here = math.log(d.layout.tp)
    cell = [r for r in c.main.runs.get(campaign_name(d.model.family, d), ()) if abs(r.position[TP] - here) < 1e-3]
    return Tier(**{m: getattr(c.near if any(getattr(r, m) for r in cell) else c.seen, m) for m in METRICS})


def engine_efficiency(d: Deployment, c: Calibration) -> tuple[Efficiency, tuple[str, ...]]:
    """Efficiencies for this deployment, and what had to be assumed."""
    engine, notes = d.engine, []
    fitted = {name.split(".")[1] for name in c.parameters if name.startswith("engine.")}
    if engine not in fitted:
        notes.append(f"{engine} was never measured on GPUs; efficiencies are the mean of the measured engines")
    return efficiency(c.parameters, engine, d.gpu.generation, d.weights), tuple(notes)


def predict(d: Deployment, c: Calibration, tier: Tier, grade: Grade, slowest: Figure | None = None) -> Performance:
    """Prediction with a given fit and given intervals; the time per token is no shorter than `slowest`."""
    t: Traffic = traffic(d)
    e, assumed = engine_efficiency(d, c)
    effect = c.effect(group_names(d.model.family, d))
    e = replace(e, wave=e.wave * math.exp(effect.wave))
    times = closed_loop(t.loop, t.peaks, e)
    per_gpu = t.running * t.loop.osl / times.cycle_s / d.layout.ranks
    if grade == "guess":
        tier = _widen(tier, 1.5)
    runs = c.runs.get(campaign_name(d.model.family, d), [])
    at = position(d, t.running + t.waiting, d.inputs.isl or 1, d.inputs.osl or 1)
    near = {m: shift(runs, at, m) for m in METRICS}
    ttft = _figure(times.ttft_s * 1e3 * math.exp(effect.ttft + near["ttft"]), tier.ttft, grade)
    tpot = _figure(times.tpot_s * 1e3 * math.exp(effect.tpot + near["tpot"]), tier.tpot, grade)
    if slowest is not None and slowest.value > tpot.value:
        tpot = slowest
    ttft, tpot, held = _possible(t, ttft, tpot)
    if d.inputs.concurrency is None:
        of_rate = ["throughput is that of a queue that never empties, learned from such runs apart from the times"]
        rate = _figure(per_gpu * math.exp(effect.throughput + near["throughput"]), tier.throughput, grade)
    else:
        of_rate = []
        rate = _rate(t, d.layout.ranks, ttft, tpot, float(times.marched_s / times.ttft_s))
    total = Figure(rate.value * d.inputs.n_gpus, rate.low * d.inputs.n_gpus, rate.high * d.inputs.n_gpus, grade)
    notes = [
        *d.notes,
        *t.notes,
        *assumed,
        *of_rate,
        *trained_context_note(d.model.spec, (d.inputs.isl or 1) + (d.inputs.osl or 1)),
    ]
    if runs:
        notes.append(
            f"{len(runs)} runs of this model, engine build and card were measured; the formulas' errors on them move the "
            f"time to first token by {math.expm1(near['ttft']):+.0%}, time per token by {math.expm1(near['tpot']):+.0%}"
        )
    if held:
        notes.append(
            "measured runs suggest more speed than the card's datasheet allows; figures stop at the datasheet's"
        )
    price = d.gpu.price(d.inputs.gpu_price_usd_h)
    if (warning := d.gpu.price_warning()) is not None and d.inputs.gpu_price_usd_h is None:
        notes.append(warning)
    share = prefill_share(t, e)
    return Performance(
        subject=describe(d),
        ttft_ms=ttft,
        tpot_ms=tpot,
        output_tokens_per_s_per_gpu=rate,
        output_tokens_per_s=total,
        usd_per_million_output_tokens=None if price is None else usd_per_million(price, rate),
        usd_per_million_input_tokens=None if price is None else _input_price(d, price, rate, share),
        running=t.running,
        waiting=t.waiting,
        fits=t.fits,
        decode_ms={name: float(s) * 1e3 for name, s in operators(t.loop.decode, t.peaks, e).items()},
        prefill_ms={name: float(s) * 1e3 for name, s in operators(t.loop.prefill, t.peaks, e).items()},
        tokens_per_step=float(t.loop.tokens_per_step),
        notes=tuple(dict.fromkeys(notes)),
    )


def _possible(t: Traffic, ttft: Figure, tpot: Figure) -> tuple[Figure, Figure, bool]:
    """Times that the datasheet's peaks allow, and whether a value had to be moved there.

    Factors fitted to runs that were faster than that (their concurrency or number of GPUs is not what it says) reach below. The
    interval is moved with the value: how far a run may be above it is known no better.
    """
    held = False

    def possible(figure: Figure, least_ms: float) -> Figure:
        nonlocal held
        if figure.value >= least_ms:
            return msgspec.structs.replace(figure, low=max(figure.low, least_ms))
        held = True
        return Figure(least_ms, least_ms, figure.high * least_ms / figure.value, figure.grade)

    step_ms = float(fastest_seconds(t.loop.decode, t.peaks)) * 1e3
    first = possible(ttft, float(fastest_seconds(t.loop.alone, t.peaks)) * 1e3)
    return first, possible(tpot, step_ms / float(t.loop.tokens_per_step)), held


def _rate(t: Traffic, ranks: int, ttft: Figure, tpot: Figure, marched: float) -> Figure:
    """Output tokens per second and GPU of the closed loop that has these times (Little's law); `marched`: share of the time
    to first token that its cycle does not hold."""
    osl = float(t.loop.osl)

    def rate(ttft_ms: float, tpot_ms: float) -> float:
        cycle_s = (ttft_ms * (1.0 - marched) + tpot_ms * (osl - 1.0)) / 1e3
        return (t.running + t.waiting) * osl / cycle_s / ranks

    return Figure(rate(ttft.value, tpot.value), rate(ttft.high, tpot.high), rate(ttft.low, tpot.low), tpot.grade)


def prefill_share(t: Traffic, e: Efficiency) -> float:
    """Share of the engine's time that goes into prompts."""
    times = closed_loop(t.loop, t.peaks, e)
    prompts = t.running / t.loop.replicas_in_step * times.prompt_s
    return float(prompts / (prompts + times.decode_s * t.loop.osl / t.loop.tokens_per_step))


def _input_price(d: Deployment, price: Figure, rate: Figure, share: float) -> Figure | None:
    """$/M prompt tokens: the cost of the time that prompts take, over the prompt tokens of the same requests."""
    if d.inputs.isl is None or d.inputs.osl is None or share <= 0:
        return None
    factor = d.inputs.isl / d.inputs.osl / share
    per_input = Figure(rate.value * factor, rate.low * factor, rate.high * factor, rate.grade)
    return usd_per_million(price, per_input)


def _figure(value: float, band: Band, grade: Grade) -> Figure:
    return Figure(float(value * band.shift), float(value * band.low), float(value * band.high), grade)


def _widen(tier: Tier, factor: float) -> Tier:
    def band(b: Band) -> Band:
        return msgspec.structs.replace(b, low=b.low / factor, high=b.high * factor)

    return Tier(band(tier.ttft), band(tier.tpot), band(tier.throughput))


def prediction(inputs: Inputs) -> Prediction:
    """The shared prediction type, for the benchmark to compare with what it measures."""
    from headrace.plan.fit import fit

    p, memory = perf(inputs), fit(inputs)
    return Prediction(
        subject=p.subject,
        ttft_ms=p.ttft_ms,
        tpot_ms=p.tpot_ms,
        output_tokens_per_s=p.output_tokens_per_s,
        output_tokens_per_s_per_gpu=p.output_tokens_per_s_per_gpu,
        usd_per_million_output_tokens=p.usd_per_million_output_tokens,
        weights_bytes=memory.figures["weights_bytes"],
        kv_pool_bytes=memory.figures["kv_pool_bytes"],
        max_users=memory.figures["max_users"],
        notes=p.notes,
    )


def ridge_flops_per_byte(gpu: Gpu, compute: str) -> float:
    """Arithmetic intensity at which a card turns from memory-bound to compute-bound."""
    peak = gpu.peak_flops(compute) or gpu.peak_flops("bf16") or gpu.peak_flops("fp16") or 0.0
    return peak / gpu.bandwidth
