"""Search: which GPU, how many, cut how, at which precision and batch, for given service levels - cheapest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from headrace.base.errors import HeadraceError, InvalidInput
from headrace.base.units import GIB, ceil_div
from headrace.plan.calibration import CalibrationSet, shipped
from headrace.plan.deployment import Deployment, Inputs, find_model, resolve, trained_context_note
from headrace.plan.economics import Fleet, QueryCost, fleet, query_cost
from headrace.plan.fit import Fit, fit_deployment
from headrace.plan.perf import Performance, perf_deployment
from headrace.spec import hardware
from headrace.spec.model import Attention, LatentAttention, MoE
from headrace.spec.prediction import Figure
from headrace.spec.sharding import Layout
from headrace.spec.workload import Preset, Slo

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a deployment must do. `min_users`: requests that one instance must serve at once; `rate_rps` sizes a fleet.

    `pp`: pipeline stages to try; `dp`: attention replicas to try, of models with experts (those of a dense model would be
    instances of their own). The rest of a count's GPUs are tensor-parallel.
    """

    model: str
    isl: int
    osl: int
    slo: Slo
    engine: str = "vllm"
    gpus: tuple[str, ...] = ()
    counts: tuple[int, ...] = (1, 2, 4, 8)
    pp: tuple[int, ...] = (1, 2)
    dp: tuple[int, ...] = (1, 2, 4, 8)
    weights: tuple[str, ...] = ("auto",)
    kv: tuple[str, ...] = ("auto",)
    min_users: int = 1
    prefix_hit_rate: float = 0.0
    turns: int = 1
    rate_rps: float | None = None
    prices: dict[str, float] = {}

    @staticmethod
    def from_preset(model: str, preset: Preset, **changes: Any) -> Need:
        """The need of a preset; keyword arguments override its fields."""
        fields: dict[str, Any] = {
            "model": model,
            "isl": preset.isl,
            "osl": preset.osl,
            "slo": preset.slo,
            "turns": preset.turns,
            "prefix_hit_rate": preset.prefix_hit_rate,
        }
        return Need(**(fields | changes))


class Candidate(msgspec.Struct, frozen=True):
    """A deployment that meets every service level, at its best batch. `max_num_seqs`: the limit of sequences that the engine has
    to be given, if its default is too low."""

    gpu: str
    gpus: int
    tp: int
    pp: int
    dp: int
    ep: int
    engine: str
    weights: str
    kv: str
    concurrency: int
    max_users: int
    max_num_seqs: int | None
    ttft_ms: Figure
    tpot_ms: Figure
    output_tokens_per_s_per_gpu: Figure
    usd_per_million_output_tokens: Figure | None
    usd_per_million_input_tokens: Figure | None
    cost: QueryCost | None
    fleet: Fleet | None
    notes: tuple[str, ...]


class Rejected(msgspec.Struct, frozen=True):
    """A deployment that misses a service level, the reason, and the smallest change that would make it pass."""

    gpu: str
    gpus: int
    tp: int
    pp: int
    dp: int
    ep: int
    weights: str
    kv: str
    reason: str
    change: str


class Ranking(msgspec.Struct, frozen=True):
    """Candidates by $/M output tokens; those without a known price follow, by throughput."""

    need: Need
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    notes: tuple[str, ...]


def rank(need: Need, calibration: CalibrationSet | None = None) -> Ranking:
    """Try every combination and rank those that meet the need, cheapest first. InvalidInput names what cannot be searched."""
    chosen = calibration or shipped()
    find_model(need.model)  # a wrong name is the caller's error, not a rejected candidate
    _check(need)
    for gpu in need.gpus:
        hardware.find(gpu)
    for field, values in (("gpus", need.counts), ("pp", need.pp), ("dp", need.dp)):
        if min(values, default=0) < 1:
            raise InvalidInput(f"{field} must name numbers of at least 1, got {list(values)}", field=field)
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    notes: list[str] = []
    seen: set[tuple[object, ...]] = set()
    for asked in _space(need):
        try:
            d = _resolved(need, asked)
            same = (d.gpu.id, d.inputs.n_gpus, d.layout, d.weights, d.kv)
            if same in seen:  # what auto stands for was asked for by name too
                continue
            seen.add(same)
            outcome = _judge(need, asked, d, chosen)
        except HeadraceError as error:
            outcome = _reject(asked, error.message, error.remedy or "choose another layout")
        if isinstance(outcome, Candidate):
            candidates.append(outcome)
        else:
            rejected.append(outcome)
    if not candidates and not rejected:
        raise InvalidInput(
            f"no way to cut {need.model} over {list(need.counts)} GPUs into {list(need.pp)} stages and {list(need.dp)} replicas",
            field="gpus",
            remedy="give a count that they divide; models without experts take no attention replicas, and some cards no link",
        )
    candidates.sort(key=_order)
    unpriced = sorted({c.gpu for c in candidates if c.usd_per_million_output_tokens is None})
    priced = sorted({c.gpu for c in candidates} - set(unpriced) - set(need.prices))
    limits = sorted({c.max_num_seqs for c in candidates if c.max_num_seqs is not None})
    notes += trained_context_note(find_model(need.model).spec, need.isl + need.osl)
    if unpriced:
        notes.append(f"no price is known for {', '.join(unpriced)}: ranked last, by throughput; give one with --price")
    notes += _old_prices(priced)
    notes += [_raised(limit, need.min_users) for limit in limits]
    return Ranking(need, tuple(candidates), tuple(rejected), tuple(notes))


def _old_prices(gpus: Sequence[str]) -> list[str]:
    """One note for all cards whose price is older than it should be: a list of them would hide the ranking."""
    cards = [hardware.find(name) for name in gpus]
    old = [(gpu, warning) for gpu in cards if (warning := gpu.price_warning()) is not None]
    if len(old) < 2:
        return [warning for _, warning in old]
    dates = sorted({gpu.figures["price_usd_h"].date for gpu, _ in old})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return [
        f"prices of {len(old)} cards date from {span}; check them and override with --price ({', '.join(gpu.name for gpu, _ in old)})"
    ]


def _raised(limit: int, users: int) -> str:
    return f"set the engine's limit of sequences higher than its default, {limit} for {users} at once"


def _check(need: Need) -> None:
    """What would be wrong with every candidate is wrong with the question."""
    if need.min_users < 1:
        raise InvalidInput(f"min_users must be at least 1, got {need.min_users}", field="users")
    if need.rate_rps is not None and not 0 < need.rate_rps < float("inf"):
        raise InvalidInput(f"rate must be above 0 requests per second, got {need.rate_rps}", field="rate")
    for gpu, price in need.prices.items():
        if not 0 < price < float("inf"):
            raise InvalidInput(f"the price of {gpu} must be above 0, got {price}", field="price")
    for weights in need.weights:
        for kv in need.kv:
            resolve(
                Inputs(
                    model=need.model,
                    gpu="h200-sxm-141",
                    engine=need.engine,
                    weights=weights,
                    kv=kv,
                    isl=need.isl,
                    osl=need.osl,
                )
            )


def _order(c: Candidate) -> tuple[bool, float]:
    usd = c.usd_per_million_output_tokens
    return (usd is None, -c.output_tokens_per_s_per_gpu.value if usd is None else usd.value)


def _space(need: Need) -> Iterator[Inputs]:
    gpus = [hardware.find(name) for name in need.gpus] or [g for g in hardware.catalog().values() if g.link != "none"]
    moe = any(isinstance(layer.mlp, MoE) for layer in find_model(need.model).spec.layers)
    for gpu in gpus:
        for count in (n for n in need.counts if n <= gpu.max_linked_gpus):
            for layout in _layouts(count, need, moe):
                for weights in need.weights:
                    for kv in need.kv:
                        yield Inputs(
                            model=need.model,
                            gpu=gpu.id,
                            n_gpus=count,
                            tp=layout.tp,
                            pp=layout.pp,
                            dp=layout.dp,
                            ep=layout.ep,
                            engine=need.engine,
                            weights=weights,
                            kv=kv,
                            isl=need.isl,
                            osl=need.osl,
                            max_model_len=need.isl + need.osl,
                            prefix_hit_rate=need.prefix_hit_rate,
                            gpu_price_usd_h=need.prices.get(gpu.id),
                        )


def _layouts(count: int, need: Need, moe: bool) -> Iterator[Layout]:
    """All ways to cut an instance over `count` GPUs. Experts are cut like the rest, or spread over all ranks of a stage; with
    attention replicas they are always spread."""
    for pp in need.pp:
        for dp in need.dp:
            if (dp > 1 and not moe) or count % (pp * dp):
                continue
            stage = count // pp
            spread = {stage} if dp > 1 else {1, stage} if moe else {1}
            for ep in sorted(spread):
                yield Layout(stage // dp, pp, dp, ep)


def _resolved(need: Need, asked: Inputs) -> Deployment:
    """The deployment with the engine's default limit of sequences, raised where it is below the users, as whoever asks for so
    many would do."""
    asked = msgspec.structs.replace(asked, max_num_seqs=None)
    d = resolve(asked)
    if d.max_num_seqs * d.layout.dp >= need.min_users:
        return d
    return resolve(msgspec.structs.replace(asked, max_num_seqs=ceil_div(need.min_users, d.layout.dp)))


def _judge(need: Need, asked: Inputs, d: Deployment, calibration: CalibrationSet) -> Candidate | Rejected:
    memory = fit_deployment(d, need.isl + need.osl)
    if not memory.fits:
        return _reject(asked, memory.reason, _change(need, d, memory, None, calibration))
    if memory.max_users < need.min_users:
        return _reject(
            asked,
            f"{memory.max_users} users of {need.isl + need.osl} tokens fit, {need.min_users} are asked",
            _change(need, d, memory, None, calibration),
        )
    best: tuple[float, int, Performance] | None = None
    closest: Performance | None = None
    for batch in (b for b in sorted({*BATCHES, need.min_users}) if need.min_users <= b <= memory.max_users):
        p = perf_deployment(_resolved(need, msgspec.structs.replace(asked, concurrency=batch)), calibration)
        closest = closest or p
        if not need.slo.met(p.ttft_ms.value, p.tpot_ms.value):
            continue
        if best is None or p.output_tokens_per_s_per_gpu.value > best[0]:
            best = (p.output_tokens_per_s_per_gpu.value, batch, p)
    if best is None:
        if closest is None:
            return _reject(asked, f"no batch of {need.min_users} or more fits", "ask for fewer users")
        return _reject(asked, _misses(need.slo, closest), _change(need, d, memory, closest, calibration))
    _, batch, p = best
    return _candidate(need, d, memory, batch, p)


def _candidate(need: Need, d: Deployment, memory: Fit, batch: int, p: Performance) -> Candidate:
    out, into = p.usd_per_million_output_tokens, p.usd_per_million_input_tokens
    price = d.gpu.price(d.inputs.gpu_price_usd_h)
    cost = None
    if out is not None and into is not None:
        # $/M output carries the whole bill; of it prompts are charged the share of time that they take.
        prompts = into.value * need.isl / (out.value * need.osl)
        cost = query_cost(into.value, out.value * max(0.0, 1.0 - prompts), need.isl, need.osl, need.turns)
    raised = () if d.inputs.max_num_seqs is None else (_raised(d.max_num_seqs, need.min_users),)
    size = None
    if need.rate_rps is not None:
        rate = p.output_tokens_per_s_per_gpu.value * d.inputs.n_gpus
        size = fleet(need.rate_rps, need.osl, rate, d.inputs.n_gpus, None if price is None else price.value)
    return Candidate(
        gpu=d.gpu.id,
        gpus=d.inputs.n_gpus,
        tp=d.layout.tp,
        pp=d.layout.pp,
        dp=d.layout.dp,
        ep=d.layout.ep,
        engine=d.engine,
        weights=d.weights,
        kv=d.kv,
        concurrency=batch,
        max_users=memory.max_users,
        max_num_seqs=d.inputs.max_num_seqs,
        ttft_ms=p.ttft_ms,
        tpot_ms=p.tpot_ms,
        output_tokens_per_s_per_gpu=p.output_tokens_per_s_per_gpu,
        usd_per_million_output_tokens=out,
        usd_per_million_input_tokens=into,
        cost=cost,
        fleet=size,
        notes=(*p.notes, *raised),
    )


def layout_name(cut: Candidate | Rejected) -> str:
    """Its ranks of each kind, tensor-parallel ones always: "tp2 dp4"."""
    return " ".join(f"{name}{n}" for name in ("tp", "pp", "dp", "ep") if (n := getattr(cut, name)) > 1 or name == "tp")


def _reject(i: Inputs, reason: str, change: str) -> Rejected:
    return Rejected(i.gpu, i.n_gpus, i.tp or 1, i.pp, i.dp, i.ep, i.weights, i.kv, reason, change)


def _over(slo: Slo, p: Performance) -> Iterator[tuple[str, float, float, int]]:
    """Service levels that are missed: what, the time and the limit in ms, decimals worth telling."""
    levels = (("TTFT", p.ttft_ms.value, slo.ttft_ms, 0), ("time per token", p.tpot_ms.value, slo.tpot_ms, 1))
    for name, ms, limit_ms, decimals in levels:
        if limit_ms is not None and ms > limit_ms:
            yield name, ms, limit_ms, decimals


def _misses(slo: Slo, p: Performance) -> str:
    parts = (f"{name} {ms:.{n}f} ms against {limit_ms:.{n}f} ms" for name, ms, limit_ms, n in _over(slo, p))
    return " and ".join(parts) + " already at the smallest batch asked"


def _change(need: Need, d: Deployment, memory: Fit, times: Performance | None, calibration: CalibrationSet) -> str:
    """The first of: a narrower KV cache, narrower weights, more GPUs, that meets the whole need.

    Where none does, how far the service levels would have to give: as it is, if it fits (`times`: at the smallest batch), else
    after the first of these that makes it fit; and where nothing fits, how much memory is missing.
    """
    fitting: tuple[str, Performance] | None = None
    for label, changed in _alternatives(d):
        try:
            trial = _resolved(need, msgspec.structs.replace(changed, concurrency=need.min_users))
            after = fit_deployment(trial, memory.context)
            if not after.fits or after.max_users < need.min_users:
                continue
            p = perf_deployment(trial, calibration)
        except HeadraceError:
            continue
        if need.slo.met(p.ttft_ms.value, p.tpot_ms.value):
            return label
        fitting = fitting or (label, p)
    if times is not None:
        return _relaxed(need.slo, times)
    if fitting is not None:
        label, p = fitting
        return f"{label} and {_relaxed(need.slo, p)}"
    held = memory.weights_bytes + memory.activation_bytes + memory.overhead_bytes
    over = max(0, held - memory.budget_bytes) if memory.kv_pool_bytes == 0 else 0
    missing = (over + memory.kv_bytes_per_request * need.min_users - memory.kv_pool_bytes) / GIB
    way = "a larger card or more of them" if memory.limit == "weights" else "a larger card or a shorter context"
    return f"needs {max(missing, 0.1):.1f} GiB more per GPU: take {way}"


def _relaxed(slo: Slo, p: Performance) -> str:
    parts = (f"{name} to {math.ceil(10**n * ms) / 10**n:.{n}f} ms" for name, ms, _, n in _over(slo, p))
    return "relax " + " and ".join(parts)


def _alternatives(d: Deployment) -> Iterator[tuple[str, Inputs]]:
    i = d.inputs
    change = msgspec.structs.replace
    if d.kv in ("bf16", "fp16"):
        yield "use an FP8 KV cache (--kv fp8)", change(i, kv="fp8")
    narrower = {"bf16": ("fp8", "int4"), "fp16": ("fp8", "int4"), "fp8_e4m3": ("int4",), "fp8_block128": ("int4",)}
    for weights in narrower.get(d.weights, ()):
        yield f"store the weights in {weights} (--weights {weights})", change(i, weights=weights)
    for more in (2, 4, 8):
        if i.n_gpus < more <= d.gpu.max_linked_gpus and _divides(d, more):
            yield f"take {more} GPUs (--gpus {more} --tp {more})", change(i, n_gpus=more, tp=more, pp=1, dp=1, ep=1)
    for weights in ("fp8", "int4"):
        for more in (2, 4, 8):
            if i.n_gpus < more <= d.gpu.max_linked_gpus and _divides(d, more):
                yield (
                    f"take {more} GPUs and {weights} weights (--gpus {more} --tp {more} --weights {weights})",
                    change(i, n_gpus=more, tp=more, pp=1, dp=1, ep=1, weights=weights),
                )


def _divides(d: Deployment, tp: int) -> bool:
    return all(
        layer.mixer.num_heads % tp == 0
        for layer in d.model.spec.layers
        if isinstance(layer.mixer, Attention | LatentAttention)
    )


class Swing(msgspec.Struct, frozen=True):
    """$/M output tokens when one input moves from `low` to `high`, all else fixed."""

    what: str
    low: float
    high: float
    base: float


def tornado(inputs: Inputs, calibration: CalibrationSet | None = None) -> tuple[Swing, ...]:
    """What moves the price of a token, largest swing first. InvalidInput if the card has no known price."""
    chosen = calibration or shipped()
    change = msgspec.structs.replace

    def usd(changed: Inputs) -> float:
        figure = perf_deployment(resolve(changed), chosen).usd_per_million_output_tokens
        if figure is None:
            raise InvalidInput("sensitivity needs a price", field="price", remedy="give --price")
        return figure.value

    base = usd(inputs)
    gpu = hardware.find(inputs.gpu)
    price = gpu.price(inputs.gpu_price_usd_h)
    assert price is not None
    isl, osl, batch = inputs.isl or 1024, inputs.osl or 256, inputs.concurrency or 16
    trials: Sequence[tuple[str, Inputs, Inputs]] = (
        ("GPU price", change(inputs, gpu_price_usd_h=price.low), change(inputs, gpu_price_usd_h=price.high)),
        (
            "concurrency x 1/2 .. x 2",
            change(inputs, concurrency=max(1, batch // 2)),
            change(inputs, concurrency=batch * 2),
        ),
        ("prompt length x 1/2 .. x 2", change(inputs, isl=max(1, isl // 2)), change(inputs, isl=isl * 2)),
        ("answer length x 1/2 .. x 2", change(inputs, osl=max(2, osl // 2)), change(inputs, osl=osl * 2)),
        ("prefix hits 0 .. 80 %", change(inputs, prefix_hit_rate=0.0), change(inputs, prefix_hit_rate=0.8)),
        ("KV precision 16 .. 8 bit", change(inputs, kv="bf16"), change(inputs, kv="fp8")),
        ("weights 16 .. 8 bit", change(inputs, weights="bf16"), change(inputs, weights="fp8")),
    )
    swings = []
    for what, low, high in trials:
        try:
            swings.append(Swing(what, usd(low), usd(high), base))
        except HeadraceError:
            continue
    return tuple(sorted(swings, key=lambda s: -abs(s.high - s.low)))
