"""Simulation: the engine's own scheduler on a virtual clock, with an executor that is the cost model."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from headrace.base.clock import VirtualClock
from headrace.base.errors import InvalidInput, UnsupportedModel
from headrace.control.config import SchedulerConfig
from headrace.control.prefill import GPU_LIMITS, PrefillLimits
from headrace.control.request import Request, Sampling
from headrace.control.scheduler import Scheduler
from headrace.control.step import RowResult, StepPlan, StepResult
from headrace.plan.calibration import group_names, shipped
from headrace.plan.costs.roofline import peaks, step_seconds
from headrace.plan.costs.work import compute_precision, rank_model, step_work
from headrace.plan.deployment import Deployment, Inputs, resolve
from headrace.plan.fit import make_pool, rank_memory
from headrace.plan.perf import engine_efficiency
from headrace.plan.workload import units
from headrace.spec import accounting
from headrace.spec.accounting import Span
from headrace.spec.cache import CacheGroup, CacheLayout
from headrace.spec.sharding import rank_spec
from headrace.spec.workload import Arrival, Slo, prompt_tokens


class Percentiles(msgspec.Struct, frozen=True):
    """Of one quantity over the requests (or, for gaps, over all gaps), in milliseconds."""

    p50: float
    p90: float
    p95: float
    p99: float
    mean: float


class Simulation(msgspec.Struct, frozen=True):
    """What a simulated engine did. `goodput_rps`: requests per second that met the service levels."""

    requests: int
    refused: int
    duration_s: float
    ttft_ms: Percentiles
    itl_ms: Percentiles
    tpot_ms: Percentiles
    output_tokens_per_s: float
    requests_per_s: float
    goodput_rps: float
    slo_met: float
    prefix_hit_rate: float
    preemptions: int
    steps: int
    notes: tuple[str, ...]


def percentiles(values: Sequence[float]) -> Percentiles:
    """Nearest-rank percentiles; zeros for no values."""
    if not values:
        return Percentiles(0.0, 0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)

    def rank(q: float) -> float:
        return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]

    return Percentiles(rank(0.5), rank(0.9), rank(0.95), rank(0.99), sum(ordered) / len(ordered))


def step_cost(d: Deployment) -> Callable[[StepPlan], float]:
    """Seconds of a step plan under the calibrated roofline, campaign offsets included."""
    calibration = shipped().main
    m = rank_model(d)
    p = peaks(d.gpu, compute_precision(d.weights, units(d.gpu)))
    e, _ = engine_efficiency(d, calibration)
    offset = math.exp(calibration.effect(group_names(d.model.family, d)).tpot)

    def seconds(plan: StepPlan) -> float:
        prefill = [Span(c.start, c.length, c.sample) for c in plan.chunks if c.length > 1]
        contexts = [c.start + 1 for c in plan.chunks if c.length == 1]
        decode = [(len(contexts), round(sum(contexts) / len(contexts)))] if contexts else []
        return float(step_seconds(step_work(m, prefill, decode, graphs=not d.inputs.eager), p, e)) * offset

    return seconds


def cache_of(d: Deployment) -> tuple[CacheLayout, int]:
    """The block layout of one rank and how many blocks its pool has.

    Models whose layers cannot share one pool are given a single group with the same bytes per token.
    """
    memory = rank_memory(d)
    if memory.pool <= 0:
        raise InvalidInput(
            f"{d.model.id} leaves no memory for KV on {d.gpu.name}: there is nothing to simulate",
            field="gpu",
            remedy="see plan fit",
        )
    rank = rank_spec(d.model.spec, d.layout)
    block = max(16, d.block_tokens)
    try:
        layout = accounting.cache_layout(rank, d.kv, block)
        return layout, accounting.pool_blocks(memory.pool, layout)
    except UnsupportedModel:
        pool = make_pool(d, memory.pool, memory.caches)
        context = min(d.max_model_len, 8192)
        tokens = max(pool.users(context) * context, block)
        layers = tuple(range(len(rank.layers)))
        layout = CacheLayout(
            (CacheGroup(layers),), len(layers), block, 1, 1, 1, d.kv, max(1, memory.pool // tokens) * block
        )
        return layout, tokens // block


class _Live(msgspec.Struct):
    arrived_s: float
    osl: int
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0


def simulate(
    inputs: Inputs,
    arrivals: Sequence[Arrival],
    *,
    closed_loop: int | None = None,
    slo: Slo | None = None,
    cost: Callable[[StepPlan], float] | None = None,
    prefill: PrefillLimits | None = None,
    max_steps: int = 2_000_000,
) -> Simulation:
    """Serve `arrivals` on one instance. With `closed_loop`, arrival times are ignored and that many requests are always in flight.

    `prefill`: limits on prompts beside running streams; None means the defaults of our engine on a GPU, and no limits for
    other engines. Of r attention replicas one is simulated, with every r-th request and the others equally busy; rates are those
    of all. Pipeline stages, speculation and prompts that are kept back raise `InvalidInput`.
    """
    if not arrivals:
        raise InvalidInput("there are no requests to simulate", field="requests")
    if closed_loop is not None and closed_loop < 1:
        raise InvalidInput(f"concurrency must be at least 1, got {closed_loop}", field="concurrency")
    d = resolve(inputs)
    if d.layout.pp > 1:
        raise InvalidInput(
            "pipeline stages are not simulated", field="pp", remedy="simulate tensor parallelism, or see plan perf"
        )
    if inputs.draft_tokens:
        raise InvalidInput(
            "speculation is not simulated", field="draft_tokens", remedy="leave it out, or see plan perf"
        )
    if inputs.batch_wait_steps or inputs.poll_steps > 1:
        raise InvalidInput(
            "prompts that an engine keeps back are not simulated",
            field="poll_steps" if inputs.poll_steps > 1 else "batch_wait_steps",
            remedy="leave it out, or see plan perf",
        )
    replicas = 1.0
    if (dp := d.layout.dp) > 1:
        together = len(arrivals) if closed_loop is None else min(closed_loop, len(arrivals))
        share = -(-together // dp)
        # Where requests do not come out even, others have fewer than this one.
        replicas = together / share
        arrivals = sorted(arrivals, key=lambda a: a.at_s)[::dp]
        closed_loop = None if closed_loop is None else share
    seconds = cost or step_cost(d)
    layout, blocks = cache_of(d)
    sequences = min(d.max_num_seqs, d.max_batched_tokens)
    if prefill is None:
        prefill = GPU_LIMITS if d.engine == "headrace" and inputs.chunked_prefill else PrefillLimits()
    longest = max(2, d.max_model_len)
    # A prompt that is too long is refused, however long it is.
    prompts = prompt_tokens([a if a.isl <= longest else replace(a, isl=longest + 1) for a in arrivals])
    clock = VirtualClock()
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=sequences,
            max_batched_tokens=d.max_batched_tokens,
            max_model_len=longest,
            max_prefill_tokens=prefill.max_prefill_tokens,
            prefill_burst=prefill.prefill_burst,
            step_target_s=prefill.step_target_s,
        ),
        layout,
        blocks,
        clock,
    )
    order = sorted(range(len(arrivals)), key=lambda i: (arrivals[i].at_s, i))
    if closed_loop is not None:
        pending = [(0.0, i) for i in order[:closed_loop]]
        stock = order[closed_loop:][::-1]
    else:
        pending = [(arrivals[i].at_s, i) for i in order]
        stock = []
    heapq.heapify(pending)
    live: dict[str, _Live] = {}
    slots: dict[int, str] = {}
    done: list[_Live] = []
    gaps: list[float] = []
    refused = steps = 0

    def admit_due() -> None:
        nonlocal refused
        while pending and pending[0][0] <= clock.now():
            at, i = heapq.heappop(pending)
            request_id = str(i)
            request = Request(
                request_id=request_id,
                prompt_token_ids=prompts[i],
                sampling=Sampling(max_tokens=arrivals[i].osl, ignore_eos=True),
                arrival_s=at,
            )
            if scheduler.submit(request) is not None:
                refused += 1
                if stock:
                    heapq.heappush(pending, (clock.now(), stock.pop()))
                continue
            live[request_id] = _Live(at, arrivals[i].osl)

    while (pending or live) and steps < max_steps:
        if not live and pending and pending[0][0] > clock.now():
            clock.advance_to(pending[0][0])
        admit_due()
        plan = scheduler.plan()
        if plan is None:
            continue
        for slot in plan.releases:
            slots.pop(slot, None)
        for init in plan.inits:
            slots[init.slot] = init.request_id
        took = seconds(plan)
        clock.advance(took)
        steps += 1
        rows = tuple(RowResult(c.slot, token_ids=(0,) if c.sample else ()) for c in plan.chunks)
        for output in scheduler.commit(plan, StepResult(plan.step_id, rows, took, took)):
            state = live.get(output.request_id)
            if state is None:
                continue
            now = clock.now()
            if output.token_ids:
                if state.first_s is None:
                    state.first_s = now
                else:
                    gaps.extend([(now - state.last_s) * 1e3 / len(output.token_ids)] * len(output.token_ids))
                state.last_s = now
                state.tokens += len(output.token_ids)
            if output.finish is not None:
                done.append(live.pop(output.request_id))
                if stock:
                    heapq.heappush(pending, (now, stock.pop()))
    return _summary(
        d, done, gaps, refused, clock.now(), scheduler, steps, slo or Slo(), bool(pending or live), replicas
    )


def _summary(
    d: Deployment,
    done: Sequence[_Live],
    gaps: Sequence[float],
    refused: int,
    duration: float,
    scheduler: Scheduler,
    steps: int,
    slo: Slo,
    cut: bool,
    replicas: float,
) -> Simulation:
    ttft = [(r.first_s - r.arrived_s) * 1e3 for r in done if r.first_s is not None]
    tpot = [(r.last_s - r.first_s) * 1e3 / (r.tokens - 1) for r in done if r.first_s is not None and r.tokens > 1]
    met = sum(
        1
        for r in done
        if r.first_s is not None
        and slo.met((r.first_s - r.arrived_s) * 1e3, (r.last_s - r.first_s) * 1e3 / max(1, r.tokens - 1))
    )
    stats = scheduler.stats()
    queried = stats.prefix_queries_tokens
    notes = ["the simulation was cut at its step limit"] if cut else []
    if (dp := d.layout.dp) > 1:
        notes.append(f"one of {dp} attention replicas was simulated; rates are those of all")
    if refused:
        notes.append(
            f"{refused} of {refused + len(done)} requests were refused: longer than {d.max_model_len:,} tokens or than the KV pool"
        )
    span = max(duration, 1e-9)
    return Simulation(
        requests=len(done),
        refused=refused,
        duration_s=duration,
        ttft_ms=percentiles(ttft),
        itl_ms=percentiles(gaps),
        tpot_ms=percentiles(tpot),
        output_tokens_per_s=replicas * sum(r.tokens for r in done) / span,
        requests_per_s=replicas * len(done) / span,
        goodput_rps=replicas * met / span,
        slo_met=met / len(done) if done else 0.0,
        prefix_hit_rate=stats.prefix_hit_tokens / queried if queried else 0.0,
        preemptions=stats.preemptions,
        steps=steps,
        notes=(*d.notes, *notes),
    )
