"""What one step has to do on one rank: FLOPs, bytes and counts, before any efficiency.

All numbers come from `headrace.spec.accounting` over the rank's share of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from headrace.plan.deployment import Deployment
from headrace.plan.stored import Parts, rank_parts
from headrace.spec import accounting
from headrace.spec.accounting import ChunkShape, LayerCache, Span
from headrace.spec.model import (
    Attention,
    LatentAttention,
    Layer,
    LinearAttention,
    Mixer,
    ModelSpec,
    MoE,
    NoMLP,
    StateSpace,
)
from headrace.spec.precision import precision
from headrace.spec.sharding import Layout, rank_spec


@dataclass(frozen=True, slots=True)
class Work:
    """One step of one rank. `*_flops` in FLOPs, `*_bytes` in bytes, `rows` sequences that take part.

    `gemm_flops`: dense matrices in the weights' compute precision; `gemm16_flops`: those kept in 16 bit, head included.
    `layers`/`moe_layers`, in units of a plain layer's kernels, run from a captured graph (decode only),
    `eager_*` are launched one kernel at a time.
    `collectives`: all-reduces or all-to-alls, moving `link_bytes` per rank in all.
    """

    gemm_flops: float = 0.0
    gemm16_flops: float = 0.0
    gemm_bytes: float = 0.0
    expert_flops: float = 0.0
    expert_bytes: float = 0.0
    prefill_attention_flops: float = 0.0
    decode_attention_flops: float = 0.0
    decode_attention_bytes: float = 0.0
    state_flops: float = 0.0
    state_bytes: float = 0.0
    layers: float = 0.0
    moe_layers: float = 0.0
    indexed_layers: float = 0.0
    eager_layers: float = 0.0
    eager_moe_layers: float = 0.0
    collectives: float = 0.0
    link_bytes: float = 0.0
    rows: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class RankModel:
    """The parts of a deployment that do not change from step to step, per rank."""

    spec: ModelSpec
    dense_bytes: int
    expert_bytes: int
    experts: int
    top_k: int
    gemm_flops_per_token: float
    gemm16_flops_per_token: float
    expert_flops_per_token: float
    head_flops_per_row: float
    kv: str
    caches: tuple[LayerCache, ...]
    mixers: tuple[tuple[Mixer, int], ...]
    layers: int
    launches: float
    moe_launches: float
    moe_layers: int
    indexed_layers: int
    hidden: int
    tp: int
    dp: int
    shards: int


def compute_precision(weights: str, gpu_has: Iterable[str]) -> str:
    """The unit that multiplies weights stored this way: their own where the card has it, else 16 bit (weight-only)."""
    has = set(gpu_has)
    name = precision(weights).name
    if name.startswith("fp8") and "fp8" in has:
        return "fp8"
    if name in ("nvfp4", "mxfp4") and "fp4" in has:
        return "fp4"
    if name == "int8" and "int8" in has:
        return "int8"
    return "bf16" if "bf16" in has else "fp16"


def rank_model(d: Deployment) -> RankModel:
    """Constants of one rank of a deployment."""
    return _rank_model(d.model.id, d.model.spec, d.layout, d.weights, d.part_weights, d.file_parts, d.kv)


@lru_cache(maxsize=512)
def _rank_model(
    model_id: str,
    spec: ModelSpec,
    layout: Layout,
    weights: str,
    part_weights: tuple[tuple[str, str], ...],
    file_parts: Parts,
    kv: str,
) -> RankModel:
    rank = rank_spec(spec, layout)
    by_part = dict(rank_parts(spec, layout, weights, part_weights, file_parts))
    unread = {"mtp", "experts"} | (set() if spec.tied_embeddings else {"embedding"})
    dense = sum(n for part, n in by_part.items() if part not in unread)
    flops = accounting.gemm_flops_per_token(rank)
    kept = {part for part, stored in part_weights if not precision(stored).quantized}
    if not precision(weights).quantized or (weights == "mxfp4"):
        kept |= {"attention", "mixer", "mlp", "shared_experts", "router"}
    kept |= {"router"} | set(spec.unquantized_parts)
    moes = [layer.mlp for layer in rank.layers if isinstance(layer.mlp, MoE)]
    quantizes = weights.startswith(("fp8", "nvfp4", "int8"))
    mixers: dict[Mixer, int] = {}
    for layer in rank.layers:
        for mixer in (layer.mixer, layer.parallel_ssm):
            if mixer is not None:
                mixers[mixer] = mixers.get(mixer, 0) + 1
    return RankModel(
        spec=rank,
        dense_bytes=dense,
        expert_bytes=by_part.get("experts", 0),
        experts=moes[0].num_experts if moes else 0,
        top_k=moes[0].top_k if moes else 0,
        gemm_flops_per_token=float(sum(n for part, n in flops.items() if part != "experts" and part not in kept)),
        gemm16_flops_per_token=float(sum(n for part, n in flops.items() if part != "experts" and part in kept)),
        expert_flops_per_token=float(flops.get("experts", 0)),
        head_flops_per_row=float(accounting.head_flops_per_row(rank)),
        kv=kv,
        caches=tuple(accounting.layer_caches(rank, kv)),
        mixers=tuple(mixers.items()),
        layers=len(rank.layers),
        launches=sum(_kernels(layer, quantizes) for layer in rank.layers) / KERNELS,
        moe_launches=sum(_expert_kernels(moe) for moe in moes) / EXPERT_KERNELS,
        moe_layers=len(moes),
        indexed_layers=sum(n for x, n in mixers.items() if isinstance(x, LatentAttention) and x.indexer is not None),
        hidden=spec.hidden_size,
        tp=layout.tp,
        dp=layout.dp,
        shards=layout.expert_shards,
    )


KERNELS = 10.0
"""Kernels of a layer with grouped-query attention and a dense MLP in 16 bit: the unit of `Work.layers`."""
EXPERT_KERNELS = 9.0
"""Kernels that a mixture of experts adds to a layer: the unit of `Work.moe_layers`."""


def _kernels(layer: Layer, quantizes: bool) -> float:
    """Kernels of one layer without its experts, a rough count: engines fuse differently. Formats with quantized activations
    quantize before each matrix."""
    count = KERNELS + (2.0 if isinstance(layer.mlp, MoE) else 4.0) * quantizes
    for mixer in (layer.mixer, layer.parallel_ssm):
        if isinstance(mixer, Attention):
            count += (mixer.qk_norm != "none") + mixer.output_gate
        elif isinstance(mixer, LatentAttention):
            count += 5.0  # two-step projections with norms, absorbed products before and after
        elif mixer is not None:
            count += 4.0  # convolution, gates, normalised keys, gated norm
    return count


def _expert_kernels(moe: MoE) -> float:
    return EXPERT_KERNELS + 3.0 * (moe.shared_intermediate > 0) + moe.shared_gate


def step_work(
    m: RankModel,
    prefill: Iterable[ChunkShape] = (),
    decode: Iterable[tuple[int, int]] = (),
    *,
    graphs: bool = True,
) -> Work:
    """The work of a step with `prefill` chunks and `decode` rows given as (how many, tokens of context).

    `graphs`: steps without chunks are replayed from captured graphs.
    Chunks and rows are those of one attention replica; with data-parallel attention the experts see all replicas' tokens.
    """
    chunks, rows = list(prefill), [(n, context) for n, context in decode if n > 0]
    captured = graphs and not chunks
    prefill_tokens = sum(c.length for c in chunks)
    decode_rows = sum(n for n, _ in rows)
    tokens = prefill_tokens + decode_rows
    sampled = decode_rows + sum(1 for c in chunks if c.sample)
    attention = state_flops = decode_flops = 0.0
    read = 0.0
    for mixer, count in m.mixers:
        if isinstance(mixer, LinearAttention | StateSpace):
            state_flops += count * _mixing_flops(mixer) * tokens
        elif isinstance(mixer, Attention | LatentAttention):
            attention += count * sum(_attention_flops(mixer, c.start, c.length) for c in chunks)
            decode_flops += count * sum(n * _attention_flops(mixer, context, 1) for n, context in rows)
            read += count * sum(n * _read_bytes(mixer, m.kv, context) for n, context in rows)
            read += count * sum(_read_bytes(mixer, m.kv, c.start) for c in chunks if c.start)
    # A state is read and written once per sequence.
    states = 2.0 * sum(c.fixed_bytes for c in m.caches) * (decode_rows + len(chunks))
    all_tokens = tokens * m.dp
    touched = accounting.expected_experts(m.experts, m.top_k, all_tokens) / m.experts if m.experts and tokens else 0.0
    reduces = 2.0 * m.layers if m.tp > 1 else 0.0
    spread = 2.0 * m.moe_layers if m.dp > 1 else 0.0
    moved = 2.0 * m.hidden * tokens
    link = (
        reduces * moved * 2.0 * (m.tp - 1) / m.tp + spread * moved * min(m.top_k, m.shards) * (m.shards - 1) / m.shards
    )
    return Work(
        gemm_flops=m.gemm_flops_per_token * tokens,
        gemm16_flops=m.gemm16_flops_per_token * tokens + m.head_flops_per_row * sampled,
        gemm_bytes=float(m.dense_bytes) if tokens else 0.0,
        expert_flops=m.expert_flops_per_token * all_tokens,
        expert_bytes=m.expert_bytes * touched,
        prefill_attention_flops=attention,
        decode_attention_flops=decode_flops,
        decode_attention_bytes=read,
        state_flops=state_flops,
        state_bytes=states,
        layers=m.launches if captured else 0.0,
        moe_layers=m.moe_launches if captured else 0.0,
        indexed_layers=float(m.indexed_layers),
        eager_layers=0.0 if captured else m.launches,
        eager_moe_layers=0.0 if captured else m.moe_launches,
        collectives=reduces + spread,
        link_bytes=link,
        rows=float(decode_rows + len(chunks)),
        tokens=float(tokens),
    )


def _one_layer(mixer: Mixer) -> ModelSpec:
    return ModelSpec("", "", 1, 1, (Layer(mixer, NoMLP()),), True, 1)


@lru_cache(maxsize=65536)
def _attention_flops(mixer: Mixer, start: int, length: int) -> float:
    return accounting.flops(_one_layer(mixer), [Span(start, length)]).attention


@lru_cache(maxsize=65536)
def _read_bytes(mixer: Attention | LatentAttention, kv: str, context: int) -> float:
    """Cache bytes that one query at `context` reads. With a sparse indexer: all index keys, but only the chosen latents."""
    if isinstance(mixer, LatentAttention) and mixer.indexer is not None:
        chosen = min(context, mixer.indexer.top_k)
        latents = accounting.latent_token_bytes(mixer, kv) * chosen
        return float(latents + accounting.index_token_bytes(mixer) * context)
    (cache,) = accounting.layer_caches(_one_layer(mixer), kv) or (LayerCache("full"),)
    return float(cache.token_bytes * cache.tokens(context))


@lru_cache(maxsize=256)
def _mixing_flops(mixer: Mixer) -> float:
    return accounting.flops(_one_layer(mixer), [Span(0, 1)]).mixing


def prompt_chunks(isl: int, batched: int, prompts: int, cached: int = 0) -> list[list[Span]]:
    """The step that prefills as many of `prompts` prompts of `isl` tokens as `batched` tokens allow, `cached` of each already
    there; of a prompt that is longer than a step, all its steps."""
    todo = isl - cached
    if todo <= batched:
        return [[Span(cached, todo)] * min(prompts, batched // todo)]
    return [[Span(at, min(batched, isl - at), at + batched >= isl)] for at in range(cached, isl, batched)]
