"""Memory: does it fit, for how many users, and which term is the limit. Itemised per rank, under each engine's own rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import msgspec

from headrace.base.units import GIB, MIB, ceil_div, format_bytes
from headrace.plan.deployment import Deployment, Inputs, resolve
from headrace.plan.pool import BytePool, Pool, SplitPool, vllm_pool
from headrace.plan.stored import Parts, rank_parts
from headrace.spec import accounting
from headrace.spec.accounting import LayerCache
from headrace.spec.model import Attention, LatentAttention, ModelSpec
from headrace.spec.prediction import Figure, exact
from headrace.spec.sharding import Layout, rank_spec

Limit = Literal["none", "weights", "activations", "kv_pool", "context"]


class Item(msgspec.Struct, frozen=True):
    """One line of the memory bill, in bytes per rank. `inside`: it comes out of the engine's memory fraction."""

    name: str
    nbytes: int
    how: str
    inside: bool = True


class Fit(msgspec.Struct, frozen=True):
    """The memory plan of one rank. Bytes per rank; tokens and users per instance.

    `fits`: one request of `context` tokens fits in the fraction of usable memory under the engine's rules. `limit` names the
    term that makes it too large or, when it fits, bounds the number of users. `kv_bytes_per_token` and
    `kv_fixed_bytes_per_request` are the line of one request's KV bytes at `context`.
    """

    subject: str
    context: int
    fits: bool
    limit: Limit
    reason: str
    weights_bytes: int
    kv_bytes_per_token: int
    kv_fixed_bytes_per_request: int
    kv_bytes_per_request: int
    activation_bytes: int
    overhead_bytes: int
    kv_pool_bytes: int
    kv_pool_tokens: int
    max_users: int
    max_context: int
    usable_bytes: int
    budget_bytes: int
    outside_fraction_bytes: int
    items: tuple[Item, ...]
    figures: dict[str, Figure]
    explain: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Byte counts of one rank before any context is chosen."""

    weights: int
    parts: tuple[tuple[str, int], ...]
    activation: int
    activation_how: str
    outside: int
    communication: int
    staging: int
    graphs: int
    graphs_inside: bool
    budget: int
    pool: int
    caches: tuple[LayerCache, ...]


def _weight_parts(
    spec: ModelSpec,
    layout: Layout,
    weights: str,
    part_weights: tuple[tuple[str, str], ...],
    file_parts: Parts,
    mxfp4_multiple: int,
    draft: bool,
) -> tuple[tuple[str, int], ...]:
    by_part = dict(rank_parts(spec, layout, weights, part_weights, file_parts))
    if weights == "mxfp4" and mxfp4_multiple > 1:
        padded = ceil_div(spec.hidden_size, mxfp4_multiple) * mxfp4_multiple
        by_part["experts"] = by_part["experts"] * padded // spec.hidden_size
    return tuple((part, n) for part, n in by_part.items() if n and (draft or part != "mtp"))


@lru_cache(maxsize=512)
def _caches(spec: ModelSpec, layout: Layout, kv: str, draft: bool) -> tuple[LayerCache, ...]:
    rank = rank_spec(spec, layout)
    if draft and rank.mtp_layers:
        # A multi-token-prediction layer caches its own keys and values.
        rank = replace(rank, layers=rank.layers + rank.mtp_layers)
    return tuple(accounting.layer_caches(rank, kv))


def _rope_table_bytes(spec: ModelSpec) -> int:
    """Cosines and sines of every position in 16 bit, one table per width of rope."""
    dims: set[int] = set()
    for layer in spec.layers:
        match layer.mixer:
            case LatentAttention():
                dims.add(layer.mixer.rope_dim)
            case Attention() if layer.mixer.rope is not None:
                dims.add(layer.mixer.rope.dim)
            case _:
                pass
    return sum(spec.max_context * dim * 2 for dim in dims)


def rank_memory(d: Deployment) -> RankMemory:
    """The memory bill of one rank of a deployment; `pool` is what remains for KV (negative if nothing does)."""
    policy, spec = d.policy, d.model.spec
    draft = d.inputs.draft_tokens > 0
    rank = rank_spec(spec, d.layout)
    parts = list(
        _weight_parts(
            spec,
            d.layout,
            d.weights,
            d.part_weights,
            d.file_parts,
            d.policy.mxfp4_hidden_multiple,
            draft,
        )
    )
    if d.model.outside_text:
        parts.append(("vision", 2 * d.model.outside_text // d.layout.tp))
    if policy.pool != "context" and (table := _rope_table_bytes(spec)):
        parts.append(("rope_table", table))
    weights = sum(n for _, n in parts)

    in_layers = accounting.activation_bytes(rank, d.max_batched_tokens, 1)
    in_layers += policy.residual_copies * d.max_batched_tokens * spec.hidden_size * 2
    if d.model.outside_text:
        in_layers += round(policy.multimodal_gib * GIB)
    per_logit = policy.logit_bytes
    if d.model.outside_text and policy.logit_bytes_multimodal is not None:
        per_logit = policy.logit_bytes_multimodal
    rows = min(d.max_num_seqs, d.max_batched_tokens) * (1 + d.inputs.draft_tokens)
    if policy.pool == "context":
        rows = d.max_batched_tokens
    in_sampler = round(rows * spec.vocab_size * per_logit)
    activation = round(max(in_layers, in_sampler) * policy.fragmentation)
    how = (
        f"{d.max_batched_tokens} tokens of one step in the layers"
        if in_layers >= in_sampler
        else f"sampling {rows} rows x {spec.vocab_size} logits x {per_logit:g} B"
    )
    ranks = d.layout.ranks
    outside = round(policy.outside_gib * GIB)
    communication = round(policy.comm_gib * GIB) if ranks > 1 else 0
    # Formats that scale keys by channel keep those of unfinished groups as computed.
    staging = accounting.kv_staging_bytes(rank, d.kv, d.max_num_seqs, "bf16")
    captured = policy.graphs_gib + policy.graphs_gib_full_batch * min(1.0, d.max_num_seqs / 256)
    graphs = 0 if d.inputs.eager else round(captured * GIB)
    usable = d.gpu.memory_bytes
    budget = round(usable * d.fraction)
    match policy.pool:
        case "total":
            pool = budget - weights - activation - outside - communication - (graphs if policy.graphs_inside else 0)
        case "static":
            budget = round((usable - outside - communication) * d.fraction)
            pool = budget - weights
        case "free":
            free = usable - outside - communication - weights - activation - graphs
            budget = round(free * d.fraction) + usable - free
            pool = round(free * d.fraction)
        case "context":
            pool = budget - weights - activation - outside - communication
    pool -= staging
    caches = _caches(spec, d.layout, d.kv, draft)
    inside = policy.graphs_inside or policy.pool == "free"
    return RankMemory(
        weights, tuple(parts), activation, how, outside, communication, staging, graphs, inside, budget, pool, caches
    )


def make_pool(d: Deployment, pool_bytes: int, caches: tuple[LayerCache, ...]) -> Pool:
    """The KV pool as the engine would cut it."""
    copies = d.policy.state_copies + d.inputs.draft_tokens
    if d.engine == "vllm" and d.policy.page_rounding:
        return vllm_pool(
            pool_bytes,
            caches,
            block_tokens=d.block_tokens,
            copies=copies,
            step_tokens=d.max_batched_tokens,
            max_model_len=d.max_model_len,
            by_concurrency=d.policy.tokens_by_concurrency,
        )
    if d.engine == "sglang":
        return SplitPool(pool_bytes, caches, copies)
    return BytePool(pool_bytes, caches, d.block_tokens, copies)


def fit(inputs: Inputs, context: int | None = None) -> Fit:
    """The memory plan for requests of `context` tokens (default: --isl + --osl, else the longest allowed context)."""
    return fit_deployment(resolve(inputs), context)


def fit_deployment(d: Deployment, context: int | None = None) -> Fit:
    """`fit` for an already resolved deployment."""
    if context is None:
        context = (d.inputs.isl + (d.inputs.osl or 0)) if d.inputs.isl else d.max_model_len
    memory = rank_memory(d)
    # Data-parallel attention keeps whole requests on a replica; every other layout shares each request.
    pool = make_pool(d, memory.pool, memory.caches)
    users = min(pool.users(context), d.max_num_seqs) * d.layout.dp
    need = pool.request_bytes(context)
    fits = memory.pool > 0 and pool.users(context) >= 1
    limit, reason = _limit(d, memory, pool, context, need, fits, users)
    line = accounting.kv_line(rank_spec(d.model.spec, d.layout), d.kv, context)
    overhead = memory.outside + memory.communication + memory.staging + (memory.graphs if memory.graphs_inside else 0)
    outside_fraction = 0 if memory.graphs_inside else memory.graphs
    slack = round(d.policy.uncertainty_gib * GIB)
    figure = d.gpu.figure("memory_gib")
    low = memory.pool - slack - round((figure.value - figure.low) * GIB * d.fraction)
    high = memory.pool + slack + round((figure.high - figure.value) * GIB * d.fraction)
    lower, upper = (make_pool(d, max(0, n), memory.caches) for n in (low, high))
    figures = {
        "weights_bytes": exact(memory.weights),
        "kv_bytes_per_token": exact(line.slope_bytes),
        "kv_fixed_bytes_per_request": exact(line.fixed_bytes),
        "activation_bytes": Figure(memory.activation, 0.7 * memory.activation, 1.3 * memory.activation, "fitted"),
        "overhead_bytes": Figure(overhead, max(0, overhead - slack), overhead + slack, "fitted"),
        "kv_pool_bytes": Figure(max(0, memory.pool), max(0, low), max(0, high), "fitted"),
        "kv_pool_tokens": Figure(
            pool.tokens * d.layout.dp, lower.tokens * d.layout.dp, upper.tokens * d.layout.dp, "fitted"
        ),
        "max_users": Figure(
            users,
            min(lower.users(context), d.max_num_seqs) * d.layout.dp,
            min(upper.users(context), d.max_num_seqs) * d.layout.dp,
            "fitted",
        ),
    }
    return Fit(
        subject=f"{d.model.id} on {d.gpu.id}",
        context=context,
        fits=fits,
        limit=limit,
        reason=reason,
        weights_bytes=memory.weights,
        kv_bytes_per_token=line.slope_bytes,
        kv_fixed_bytes_per_request=line.fixed_bytes,
        kv_bytes_per_request=need,
        activation_bytes=memory.activation,
        overhead_bytes=overhead,
        kv_pool_bytes=max(0, memory.pool),
        kv_pool_tokens=pool.tokens * d.layout.dp,
        max_users=users if fits else 0,
        max_context=_max_context(pool, max(d.max_model_len, d.model.spec.max_context)),
        usable_bytes=d.gpu.memory_bytes,
        budget_bytes=memory.budget,
        outside_fraction_bytes=outside_fraction,
        items=_items(memory),
        figures=figures,
        explain=_explain(d, memory, pool, context, need),
        notes=_notes(d, outside_fraction),
    )


def _limit(
    d: Deployment, m: RankMemory, pool: Pool, context: int, need: int, fits: bool, users: int
) -> tuple[Limit, str]:
    if m.weights > m.budget:
        return "weights", f"weights take {format_bytes(m.weights)}, the budget of a GPU is {format_bytes(m.budget)}"
    if m.pool <= 0:
        over = format_bytes(-m.pool)
        return "activations", f"activations and overhead leave nothing for KV: {over} too much"
    if not fits:
        longest = _max_context(pool, context)
        return "kv_pool", (
            f"one request of {context} tokens needs {format_bytes(need)} of KV and the pool has {format_bytes(m.pool)}; "
            f"{longest} tokens would fit"
        )
    if context > d.model.spec.max_context:
        return "context", f"the model was trained for {d.model.spec.max_context} tokens"
    if users >= d.max_num_seqs * d.layout.dp:
        return "none", f"the engine's limit of {d.max_num_seqs} sequences comes before memory"
    requests = "1 request" if users == 1 else f"{users:,} requests"
    return "kv_pool", f"the KV pool holds {requests} of {context:,} tokens"


def _max_context(pool: Pool, ceiling: int) -> int:
    """Longest context of which one request fits, at most `ceiling`."""
    low, high = 0, ceiling
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if pool.users(middle) >= 1 else (low, middle - 1)
    return low


def max_context_for(inputs: Inputs, users: int) -> int:
    """Longest context that `users` concurrent requests may have."""
    d = resolve(inputs)
    memory = rank_memory(d)
    pool = make_pool(d, memory.pool, memory.caches)
    low, high = 0, d.model.spec.max_context
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if pool.users(middle) * d.layout.dp >= users else (low, middle - 1)
    return low


def _items(m: RankMemory) -> tuple[Item, ...]:
    items = [Item(f"weights: {part}", n, "parameters x stored bytes, scales included") for part, n in m.parts]
    items.append(Item("activations", m.activation, m.activation_how))
    items.append(Item("framework", m.outside, "CUDA context, modules, workspaces"))
    if m.communication:
        items.append(Item("communication", m.communication, "collective buffers"))
    if m.staging:
        items.append(Item("kv staging", m.staging, "keys of unfinished groups, sequences x group x layers in 16 bit"))
    if m.graphs:
        items.append(Item("graphs", m.graphs, "captured decode graphs", m.graphs_inside))
    items.append(Item("kv pool", max(0, m.pool), "what remains"))
    return tuple(items)


def _explain(d: Deployment, m: RankMemory, pool: Pool, context: int, need: int) -> tuple[str, ...]:
    def mib(n: float) -> str:
        return f"{n / MIB:,.0f} MiB"

    lines = [
        f"usable memory of {d.gpu.name}: {mib(d.gpu.memory_bytes)} (marketing: {d.gpu.memory_gb_marketing:g} GB)",
        f"budget: {d.fraction:g} ({d.policy.pool}) -> {mib(m.budget)}",
        *(f"- weights, {part}: {mib(n)}" for part, n in m.parts),
        f"- activations: {mib(m.activation)} ({m.activation_how})",
        f"- framework: {mib(m.outside)}",
    ]
    if m.communication:
        lines.append(f"- communication between {d.layout.ranks} ranks: {mib(m.communication)}")
    if m.staging:
        lines.append(f"- keys of unfinished groups ({d.kv}, {d.max_num_seqs} sequences): {mib(m.staging)}")
    if m.graphs:
        where = "inside" if m.graphs_inside else "outside"
        lines.append(f"- graphs: {mib(m.graphs)} ({where} the fraction)")
    lines.append(f"= KV pool: {mib(m.pool)}, {pool.tokens:,} tokens")
    by_kind: dict[str, list[LayerCache]] = {}
    for c in m.caches:
        by_kind.setdefault(c.kind, []).append(c)
    for kind, group in by_kind.items():
        c = group[0]
        bits = [f"{len(group)} {kind} layers"]
        if c.token_bytes:
            bits.append(f"{sum(x.token_bytes for x in group):,} B per token")
        if c.window:
            bits.append(f"up to {c.window:,} tokens")
        if c.fixed_bytes:
            bits.append(f"{sum(x.fixed_bytes for x in group):,} B fixed per request")
        lines.append("KV of a request: " + ", ".join(bits))
    lines.append(f"one request of {context:,} tokens takes {mib(need)} of the pool, page rounding included")
    lines.append(f"rules: {d.policy.source}")
    return tuple(lines)


def _notes(d: Deployment, outside_fraction: int) -> tuple[str, ...]:
    notes = list(d.notes)
    if outside_fraction:
        notes.append(
            f"{outside_fraction / MIB:,.0f} MiB of graphs lie outside the memory fraction and need room beside it"
        )
    if any(isinstance(layer.mixer, LatentAttention) for layer in d.model.spec.layers) and d.layout.tp > 1:
        notes.append("the MLA latent is replicated on every tensor-parallel rank; data-parallel attention avoids that")
    if d.gpu.figure("memory_gib").grade == "guess":
        notes.append("the usable memory of this card is unverified")
    return tuple(notes)
