"""The arithmetic: the one place that turns a model's geometry into parameters, bytes and FLOPs.

The engine sizes its KV pool with it, the planner predicts with it, the metrics report with it. All byte counts are exact
integers unless a docstring calls them expected; bytes are bytes (never GB or GiB). Weights precision, KV precision and
activation precision are separate arguments everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from headrace.base.errors import DoesNotFit, InvalidInput, UnsupportedModel
from headrace.base.units import ceil_div
from headrace.spec.cache import CacheGroup, CacheLayout
from headrace.spec.model import (
    Attention,
    DenseMLP,
    LatentAttention,
    LinearAttention,
    Mixer,
    ModelSpec,
    MoE,
    NoMixer,
    NoMLP,
    StateSpace,
)
from headrace.spec.precision import Precision, kv_precision, precision
from headrace.spec.tensors import PARTS, Part, Weight, weights

if TYPE_CHECKING:
    from headrace.spec.gguf import GGUFHeader
    from headrace.spec.safetensors import StoredTensor

CacheKind = Literal["full", "sliding", "chunked", "latent", "linear", "ssm"]

# ---------------------------------------------------------------------------------------------------- parameters


class Parameters(msgspec.Struct, frozen=True):
    """Parameter counts. `active`: those one token uses – of the experts only the chosen ones, all else whole.

    A tied head is counted once, in `embedding`. `mtp` is in neither total: it is `by_part["mtp"]`.
    """

    by_part: Mapping[Part, int]
    total: int
    active: int


def parameters(spec: ModelSpec) -> Parameters:
    """Exact parameters by part. Router correction biases count: they are stored and loaded like any weight."""
    by_part: dict[Part, int] = dict.fromkeys(PARTS, 0)
    active = 0
    for w in weights(spec):
        by_part[w.part] += w.elements
        if w.part != "mtp":
            active += w.active_elements
    return Parameters(by_part, sum(n for part, n in by_part.items() if part != "mtp"), active)


def nominal_weight_bytes(spec: ModelSpec, bits: float) -> float:
    """Parameters x bits / 8: the back-of-envelope figure, without scales and without unquantized parts."""
    return parameters(spec).total * bits / 8


# ------------------------------------------------------------------------------------------------------- weights

# What a quantizer leaves alone unless a checkpoint says otherwise: lookups, the head, and whatever is tiny or sensitive.
UNQUANTIZED_PARTS: frozenset[str] = frozenset({"embedding", "lm_head", "router", "norms", "extra"})


class WeightBytes(msgspec.Struct, frozen=True):
    """Bytes of the stored weights by part; `total` leaves out `mtp`, which is loaded only for speculation."""

    by_part: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(n for part, n in self.by_part.items() if part != "mtp")


def weight_bytes(
    spec: ModelSpec,
    weights_precision: str | None = None,
    *,
    unquantized_precision: str = "bf16",
    unquantized_parts: Collection[str] | None = None,
) -> WeightBytes:
    """Exact bytes of the weights in `weights_precision` (None: the checkpoint's), scales and zero points included.

    A precision with scales applies to matrices that tokens are multiplied by, except in the parts that stay at
    `unquantized_precision`: those given, else those the checkpoint names if this is its own precision, plus
    `UNQUANTIZED_PARTS`. Vectors (norms, biases, convolutions) always stay. Parts may be given as `part@layer`.
    The bytes of a GGUF file's mix of types are those of its tensors: `file_weight_bytes`.
    """
    chosen = precision(weights_precision or spec.checkpoint_precision)
    plain = precision(unquantized_precision)
    kept = _kept_parts(spec, chosen, unquantized_parts)
    by_part: dict[str, int] = dict.fromkeys(PARTS, 0)
    for w in weights(spec):
        by_part[w.part] += w.copies * _stored(w, chosen, plain, kept)
    return WeightBytes(by_part)


def weights_read_bytes(
    spec: ModelSpec,
    weights_precision: str | None = None,
    batch_tokens: int = 1,
    *,
    unquantized_precision: str = "bf16",
    unquantized_parts: Collection[str] | None = None,
) -> float:
    """Expected bytes of weights that one step of `batch_tokens` tokens reads.

    The embedding table is left out (a lookup reads rows, not the table) unless it is tied and so read as the head. Of the
    experts, the expected number of distinct ones is read (`expected_experts`). MTP layers are not read.
    """
    if batch_tokens <= 0:
        return 0.0
    chosen = precision(weights_precision or spec.checkpoint_precision)
    plain = precision(unquantized_precision)
    kept = _kept_parts(spec, chosen, unquantized_parts)
    total = 0.0
    for w in weights(spec, mtp=False):
        if w.part == "embedding":
            if w.shape == (spec.vocab_size, spec.hidden_size) and spec.tied_embeddings:
                total += _stored(w, chosen, plain, kept)
            continue
        if w.part == "extra" and not w.linear:
            continue
        copies = expected_experts(w.copies, w.active, batch_tokens) if w.copies > 1 else 1
        total += copies * _stored(w, chosen, plain, kept)
    return total


def file_weight_bytes(header: GGUFHeader) -> WeightBytes:
    """Bytes of the tensors of a GGUF file by part, whatever mix of types it holds (alignment left out)."""
    by_part: dict[str, int] = dict.fromkeys(PARTS, 0)
    for tensor in header.tensors.values():
        by_part[gguf_part(tensor.name)] += tensor.nbytes
    return WeightBytes(by_part)


def file_weights_read_bytes(spec: ModelSpec, header: GGUFHeader, batch_tokens: int = 1) -> float:
    """Expected bytes of a GGUF file's tensors that one step of `batch_tokens` tokens reads; as `weights_read_bytes`."""
    if batch_tokens <= 0:
        return 0.0
    moe = next((layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoE)), None)
    touched = 1.0 if moe is None else expected_experts(moe.num_experts, moe.top_k, batch_tokens) / moe.num_experts
    total = 0.0
    for part, count in file_weight_bytes(header).by_part.items():
        if part == "embedding":
            total += count if spec.tied_embeddings else 0
        else:
            total += count * (touched if part == "experts" else 1.0)
    return total


def native_weight_bytes(
    spec: ModelSpec,
    weights: str = "auto",
    header: GGUFHeader | None = None,
    stored: Mapping[str, StoredTensor] | None = None,
) -> int:
    """Bytes that the native CPU backend allocates for the weights, packed and aligned (`headrace.spec.packing`).

    `weights` as in the engine's option. With a GGUF header, or the tensors that safetensors files hold, what their mix of
    types packs to; without, what the checkpoint's precision does.
    """
    from headrace.spec.packing import packed_weight_bytes

    return packed_weight_bytes(spec, weights, header, stored)


_GGUF_PARTS: tuple[tuple[str, Part], ...] = (
    (r"^(token_embd|position_embd)", "embedding"),
    (r"^output\.", "lm_head"),
    (r"norm", "norms"),
    (r"_shexp", "shared_experts"),
    (r"_exps|_chexps", "experts"),
    (r"ffn_gate_inp|exp_probs", "router"),
    (r"attn|kv_a|kv_b", "attention"),
    (r"ssm", "mixer"),
    (r"ffn", "mlp"),
)


def gguf_part(name: str) -> Part:
    """The part that a GGUF tensor belongs to, by its name; `extra` for anything else (rope factors)."""
    return next((part for pattern, part in _GGUF_PARTS if re.search(pattern, name)), "extra")


def expected_experts(num_experts: int, top_k: int, tokens: int) -> float:
    """Expected distinct experts that `tokens` tokens touch when each picks `top_k` uniformly: E(1 - (1 - k/E)^n)."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)


def _kept_parts(spec: ModelSpec, chosen: Precision, given: Collection[str] | None) -> frozenset[str]:
    if given is not None:
        return frozenset(given)
    own = spec.unquantized_parts if chosen.name == spec.checkpoint_precision else ()
    return UNQUANTIZED_PARTS | frozenset(own)


def _stored(w: Weight, chosen: Precision, plain: Precision, kept: frozenset[str]) -> int:
    """Bytes of one copy of a weight."""
    if not chosen.quantized:
        return chosen.nbytes(w.shape)
    quantizable = w.linear or (w.role == "embedding" and "embedding" not in kept)
    if not quantizable or w.role in kept or f"{w.role}@{w.layer}" in kept:
        return plain.nbytes(w.shape)
    return chosen.nbytes(w.shape)


# ------------------------------------------------------------------------------------------------------ KV cache


class LayerCache(msgspec.Struct, frozen=True):
    """What one layer keeps per request: `token_bytes` for each of the last `window` tokens (None: of all), plus `fixed_bytes`.

    `chunked`: the window is an aligned chunk, so what it holds falls back at each chunk's start.
    """

    kind: CacheKind
    token_bytes: int = 0
    window: int | None = None
    chunked: bool = False
    fixed_bytes: int = 0

    def tokens(self, context: int) -> int:
        """Tokens that are held when `context` tokens have been computed and the last of them was just attended."""
        if self.token_bytes == 0 or context <= 0:
            return 0
        if self.window is None:
            return context
        if self.chunked:
            return (context - 1) % self.window + 1
        return min(context, self.window)

    def blocks(self, context: int, block_tokens: int) -> int:
        """Blocks that hold those tokens; blocks lie at multiples of `block_tokens`, so a window may straddle one more."""
        held = self.tokens(context)
        return ceil_div(context, block_tokens) - (context - held) // block_tokens if held else 0


def layer_caches(spec: ModelSpec, kv: str, *, state: str = "fp32", conv: str | None = None) -> list[LayerCache]:
    """The caches of all main layers, in order; a layer with a parallel SSM gives two, one that shares another's gives none.

    `kv`: KV precision. `state`: precision of recurrent states (engines keep fp32), `conv`: of the convolution's last inputs
    (default: `kv`, or 16 bit where that is quantized).
    """
    found: list[LayerCache] = []
    for layer in spec.layers:
        for mixer in (layer.mixer, layer.parallel_ssm):
            if mixer is not None and (cache := _mixer_cache(mixer, kv, state, conv)) is not None:
                found.append(cache)
    return found


def _mixer_cache(mixer: Mixer, kv: str, state: str, conv: str | None) -> LayerCache | None:
    match mixer:
        case Attention():
            if mixer.kv_source is not None:
                return None
            stored = kv_precision(kv)
            per_token = mixer.num_kv_heads * stored.token_bytes(mixer.head_dim, mixer.value_dim)
            kind: CacheKind = "full" if mixer.window is None else "chunked" if mixer.chunked else "sliding"
            return LayerCache(kind, per_token, mixer.window, mixer.chunked)
        case LatentAttention():
            return LayerCache("latent", latent_token_bytes(mixer, kv) + index_token_bytes(mixer))
        case LinearAttention():
            return LayerCache("linear", fixed_bytes=state_bytes(mixer, kv, state, conv))
        case StateSpace():
            return LayerCache("ssm", fixed_bytes=state_bytes(mixer, kv, state, conv))
        case NoMixer():
            return None


def latent_token_bytes(a: LatentAttention, kv: str) -> int:
    """MLA: one latent and one rotary key per token and layer, whatever the number of heads.

    `fp8_ds_mla`, and fp8 with a sparse indexer, keep the latent in fp8 with one fp32 scale per 128 elements and the rotary key in
    16 bit (the layout of DeepSeek-V3.2, as FlashMLA's notes on its FP8 cache describe it: 512 + 16 + 128 = 656 bytes).
    """
    stored = kv_precision(kv)
    if stored.name == "fp8_ds_mla" or (a.indexer is not None and stored.name == "fp8"):
        return a.kv_lora_rank + 4 * ceil_div(a.kv_lora_rank, 128) + 2 * a.rope_dim
    return stored.vector_bytes(a.kv_lora_rank + a.rope_dim)


def index_token_bytes(a: LatentAttention) -> int:
    """Keys of the sparse indexer: fp8 with one fp32 scale per 128 elements, whatever the KV precision."""
    if a.indexer is None or a.indexer.shared:
        return 0
    return a.indexer.head_dim + 4 * ceil_div(a.indexer.head_dim, 128)


def state_bytes(mixer: LinearAttention | StateSpace, kv: str, state: str = "fp32", conv: str | None = None) -> int:
    """Fixed bytes per request: the recurrent state, and the convolution's last (kernel - 1) inputs."""
    if conv is None:
        conv = kv if kv_precision(kv).bits >= 16 else "bf16"
    if isinstance(mixer, StateSpace):
        channels = mixer.inner + (2 * mixer.groups * mixer.state if mixer.version == 2 else 0)
        elements = mixer.inner * mixer.state
    else:
        channels = 2 * mixer.num_k_heads * mixer.k_dim + mixer.num_v_heads * mixer.v_dim
        elements = mixer.num_v_heads * mixer.k_dim * mixer.v_dim
    kernel = mixer.conv_kernel
    return precision(state).nbytes((elements,)) + precision(conv).nbytes((channels * max(0, kernel - 1),))


def kv_bytes_per_token(spec: ModelSpec, kv: str, kinds: Collection[CacheKind] | None = None) -> int:
    """Bytes that one more token takes while no window is full: 2 · layers · kv_heads · head_dim · bytes for plain GQA.

    `kinds` restricts it to some kinds of layers; fixed states count nothing.
    """
    return sum(c.token_bytes for c in layer_caches(spec, kv) if kinds is None or c.kind in kinds)


def kv_bytes_per_token_by_kind(spec: ModelSpec, kv: str) -> dict[CacheKind, int]:
    """The same, split by kind of layer; kinds that the model lacks are absent."""
    split: dict[CacheKind, int] = {}
    for c in layer_caches(spec, kv):
        if c.token_bytes:
            split[c.kind] = split.get(c.kind, 0) + c.token_bytes
    return split


def kv_bytes(spec: ModelSpec, kv: str, context: int, block_tokens: int | None = None, *, state: str = "fp32") -> int:
    """Bytes one request keeps when `context` of its tokens are computed.

    Sliding and chunked layers stop growing at their window. `block_tokens` rounds each layer up to whole blocks (of that
    layer alone; `request_blocks` counts in the units of a real pool). Recurrent states are counted whole from the start.
    """
    total = 0
    for c in layer_caches(spec, kv, state=state):
        held = c.tokens(context) if block_tokens is None else c.blocks(context, block_tokens) * block_tokens
        total += c.fixed_bytes + held * c.token_bytes
    return total


class KVLine(msgspec.Struct, frozen=True):
    """KV bytes of a request as `fixed_bytes + slope_bytes · context` around some context."""

    fixed_bytes: int
    slope_bytes: int

    def at(self, context: int) -> int:
        return self.fixed_bytes + self.slope_bytes * context


def kv_line(spec: ModelSpec, kv: str, context: int, *, state: str = "fp32") -> KVLine:
    """The line at `context`: full windows are in the fixed part (a chunked layer at its peak), growing layers in the slope."""
    fixed = slope = 0
    for c in layer_caches(spec, kv, state=state):
        fixed += c.fixed_bytes
        if c.window is not None and context >= c.window:
            fixed += c.window * c.token_bytes
        else:
            slope += c.token_bytes
    return KVLine(fixed, slope)


def kv_fixed_bytes(spec: ModelSpec, kv: str, *, state: str = "fp32") -> int:
    """Bytes of recurrent and convolution states of one request, independent of its context."""
    return sum(c.fixed_bytes for c in layer_caches(spec, kv, state=state))


def mha_bytes_per_token(num_heads: int, key_dim: int, value_dim: int, num_layers: int, bits: float = 16) -> float:
    """The named baseline of KV comparisons: every head keeps its own keys and values.

    A ratio to it means nothing until heads and dimensions are said: DeepSeek-V2's latent is 56.9 times smaller than 128
    heads of 128-dim keys and values, and 71.1 times smaller than with its real 192-dim keys.
    """
    return num_heads * (key_dim + value_dim) * num_layers * bits / 8


# ---------------------------------------------------------------------------------------------------- block pool

_MOST_PADDING = 0.1


def cache_layout(spec: ModelSpec, kv: str, block_tokens: int) -> CacheLayout:
    """How the cache is cut into equal blocks, for models whose attention layers all have the same heads and dimensions.

    One kind of layer gives one group of all of them. Several kinds (windows) are cut into groups of equal size, the largest
    that pads at most 10 % of the slots; the empty slots of a group are allocated and so counted in `bytes_per_block`.
    Recurrent states are not in blocks (`kv_fixed_bytes`). Raises UnsupportedModel for mixed geometries, or none at all.
    """
    if block_tokens < 1:
        raise InvalidInput(f"block_tokens must be at least 1, got {block_tokens}", field="block_tokens")
    by_window: dict[int | None, list[int]] = {}
    shapes: set[tuple[int, int, int, int, int]] = set()
    for i, layer in enumerate(spec.layers):
        mixer = layer.mixer
        if isinstance(mixer, Attention) and mixer.kv_source is None:
            if mixer.chunked:
                raise UnsupportedModel("chunked attention has no cache layout yet", field="attention_chunk_size")
            window = mixer.window if mixer.window is not None and mixer.window < spec.max_context else None
            by_window.setdefault(window, []).append(i)
            stored = kv_precision(kv)
            per_token = mixer.num_kv_heads * stored.token_bytes(mixer.head_dim, mixer.value_dim)
            shapes.add((mixer.num_kv_heads, mixer.head_dim, mixer.value_dim, per_token, 0))
        elif isinstance(mixer, LatentAttention):
            by_window.setdefault(None, []).append(i)
            index = index_token_bytes(mixer)
            shapes.add((1, mixer.kv_lora_rank + mixer.rope_dim, 0, latent_token_bytes(mixer, kv), index))
    if not shapes:
        raise UnsupportedModel(f"{spec.name or spec.model_type} has no attention layers to cache", field="layers")
    if len(shapes) > 1:
        raise UnsupportedModel("layers with different KV heads or dimensions cannot share one pool", field="layers")
    ((heads, head_dim, value_dim, token_bytes, index_bytes),) = shapes
    size = group_size([len(layers) for layers in by_window.values()])
    groups = [
        CacheGroup(tuple(layers[at : at + size]), window)
        for window, layers in by_window.items()
        for at in range(0, len(layers), size)
    ]
    return CacheLayout(
        groups=tuple(groups),
        layers_per_group=size,
        block_tokens=block_tokens,
        num_kv_heads=heads,
        head_dim=head_dim,
        value_dim=value_dim,
        kv_precision=kv_precision(kv).name,
        bytes_per_block=size * block_tokens * (token_bytes + index_bytes),
        index_bytes_per_token=index_bytes,
        whole_blocks=kv_precision(kv).key_group > 0,
    )


def default_block_tokens(kv: str) -> int:
    """Tokens of a block where nobody says: 16, or what the format's groups of keys need."""
    return max(16, kv_precision(kv).key_group)


def kv_staging_bytes(spec: ModelSpec, kv: str, max_num_seqs: int, activation_precision: str) -> int:
    """Keys of unfinished groups, one per sequence and layer, kept as they are computed until their scales are known."""
    group = kv_precision(kv).key_group
    elements = sum(
        layer.mixer.num_kv_heads * layer.mixer.head_dim
        for layer in spec.layers
        if isinstance(layer.mixer, Attention) and layer.mixer.kv_source is None
    )
    return precision(activation_precision).nbytes((max_num_seqs * group * elements,)) if group else 0


def group_size(counts: Sequence[int]) -> int:
    """Layers per group for kinds with these counts: the largest size that leaves at most 10 % of the slots empty."""
    if len(counts) == 1:
        return counts[0]
    for size in range(max(counts), 1, -1):
        slots = sum(ceil_div(n, size) * size for n in counts)
        if slots - sum(counts) <= _MOST_PADDING * sum(counts):
            return size
    return 1


def group_blocks(layout: CacheLayout, group: int, context: int) -> int:
    """Blocks that `group` of one request holds once `context` tokens are computed (those behind its window are gone)."""
    window = layout.groups[group].window
    first = 0 if window is None else max(0, context - window) // layout.block_tokens
    return ceil_div(context, layout.block_tokens) - first if context > 0 else 0


def request_blocks(layout: CacheLayout, context: int) -> int:
    """Blocks of the pool that one request of `context` tokens holds, all groups together."""
    return sum(group_blocks(layout, g, context) for g in range(layout.num_groups))


def pool_blocks(memory_bytes: int, layout: CacheLayout) -> int:
    """Whole blocks that fit into `memory_bytes`. Raises DoesNotFit if not even one does."""
    count = memory_bytes // layout.bytes_per_block
    if count < 1:
        raise DoesNotFit(
            f"the KV pool got {max(memory_bytes, 0)} bytes but one block takes {layout.bytes_per_block}",
            field="kv_pool",
            remedy=f"give it at least {layout.bytes_per_block} bytes",
        )
    return count


def pool_tokens(blocks: int, layout: CacheLayout) -> int:
    """Tokens of full context that `blocks` blocks hold if every group keeps every token."""
    return blocks // layout.num_groups * layout.block_tokens


def layout_bytes_per_token(layout: CacheLayout) -> int:
    """Bytes of the pool that one more token takes while no window is full: `kv_bytes_per_token` plus padded slots."""
    return layout.num_groups * layout.bytes_per_block // layout.block_tokens


# --------------------------------------------------------------------------------------------------------- FLOPs


class ChunkShape(Protocol):
    """The part of a step's chunk that costs depend on; `headrace.control.step.Chunk` has it."""

    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def sample(self) -> bool: ...


class Span(msgspec.Struct, frozen=True):
    """Compute positions [start, start + length), with or without sampling after the last: a chunk without a request."""

    start: int
    length: int
    sample: bool = True


class StepFlops(msgspec.Struct, frozen=True):
    """FLOPs of a step; a multiply-add is 2. `gemm`: weight matrices except the head, `attention`: scores and values,
    `mixing`: recurrences and convolutions, `head`: the LM head over sampled rows."""

    gemm: float
    attention: float
    mixing: float
    head: float
    by_part: Mapping[str, float] = msgspec.field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.gemm + self.attention + self.mixing + self.head


def gemm_flops_per_token(spec: ModelSpec) -> dict[str, int]:
    """2 x active matrix elements per token, by part; the head is left out (it runs over sampled rows only)."""
    split: dict[str, int] = {}
    for w in weights(spec, mtp=False):
        if w.linear and w.part != "lm_head":
            split[w.part] = split.get(w.part, 0) + 2 * w.active_elements
    return split


def head_flops_per_row(spec: ModelSpec) -> int:
    return 2 * spec.vocab_size * spec.hidden_size


def flops(spec: ModelSpec, chunks: Iterable[ChunkShape]) -> StepFlops:
    """FLOPs of one step over `chunks`. Drafts and prompt log-probabilities, which sample more rows, are the caller's to add.

    Attention counts the causal half exactly: a query at position p sees p + 1 tokens, or what its window leaves.
    """
    chunks = list(chunks)
    tokens = sum(c.length for c in chunks)
    by_part = {part: float(n * tokens) for part, n in gemm_flops_per_token(spec).items()}
    attention = mixing = 0.0
    for layer in spec.layers:
        for mixer in (layer.mixer, layer.parallel_ssm):
            match mixer:
                case Attention():
                    attention += sum(_attention_flops(mixer, c.start, c.length) for c in chunks)
                case LatentAttention():
                    attention += sum(_latent_flops(mixer, c.start, c.length) for c in chunks)
                case LinearAttention() | StateSpace():
                    mixing += _recurrence_flops_per_token(mixer) * tokens
                case NoMixer() | None:
                    pass
    rows = sum(1 for c in chunks if c.sample)
    return StepFlops(sum(by_part.values()), attention, mixing, float(rows * head_flops_per_row(spec)), by_part)


def attended_tokens(start: int, length: int, window: int | None = None, *, chunked: bool = False) -> int:
    """Sum over the queries at positions start … start+length-1 of the tokens that each sees, itself included."""
    if window is None:
        return length * start + length * (length + 1) // 2
    if chunked:
        return _chunked_prefix(start + length, window) - _chunked_prefix(start, window)
    growing = max(0, min(start + length, window) - start)
    return growing * start + growing * (growing + 1) // 2 + (length - growing) * window


def _chunked_prefix(end: int, chunk: int) -> int:
    whole, rest = divmod(end, chunk)
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


def _attention_flops(a: Attention, start: int, length: int) -> float:
    return 2.0 * a.num_heads * (a.head_dim + a.value_dim) * attended_tokens(start, length, a.window, chunked=a.chunked)


def _latent_flops(a: LatentAttention, start: int, length: int) -> float:
    """The cheaper of the two forms: scores against latents (absorbed), or keys and values expanded again for the context.

    The projections of the chunk's own tokens through W_UK and W_UV are in the GEMMs in either form.
    """
    seen = attended_tokens(start, length)
    index = 0.0
    if a.indexer is not None:
        index = 0.0 if a.indexer.shared else 2.0 * a.indexer.num_heads * a.indexer.head_dim * seen
        seen = attended_tokens(start, length, a.indexer.top_k)
    absorbed = 2.0 * a.num_heads * (2 * a.kv_lora_rank + a.rope_dim) * seen
    expand_context = 2.0 * a.kv_lora_rank * a.num_heads * (a.nope_dim + a.v_dim) * start
    expanded = 2.0 * a.num_heads * (a.nope_dim + a.rope_dim + a.v_dim) * seen + expand_context
    return index + min(absorbed, expanded)


def _recurrence_flops_per_token(mixer: LinearAttention | StateSpace) -> float:
    """The recurrent form: per state element a decay, a rank-1 update and a read-out (delta rules read once more), and the
    convolution. Chunked prefill kernels do more arithmetic in faster units."""
    if isinstance(mixer, StateSpace):
        channels = mixer.inner + (2 * mixer.groups * mixer.state if mixer.version == 2 else 0)
        return 5.0 * mixer.inner * mixer.state + 2.0 * channels * mixer.conv_kernel
    channels = 2 * mixer.num_k_heads * mixer.k_dim + mixer.num_v_heads * mixer.v_dim
    per_element = 5.0 if mixer.flavour == "lightning" else 7.0
    convolution = 2.0 * channels * mixer.conv_kernel
    return per_element * mixer.num_v_heads * mixer.k_dim * mixer.v_dim + convolution


# -------------------------------------------------------------------------------------------------- activations


def activation_bytes(
    spec: ModelSpec,
    max_batched_tokens: int,
    max_num_seqs: int,
    *,
    activation_precision: str = "bf16",
    logits_precision: str = "fp32",
) -> int:
    """Modelled peak of a step's working memory: it follows the tokens of a step (the chunk size), not the requests.

    The residual stream and its normed copy live throughout; beside them the widest moment of one layer (fused QKV with the
    attention's output, or gate and up with their product – of an MoE the rows of all chosen experts). The head runs after
    the layers, over at most one row per sequence, so the peak is the larger of the two moments, not their sum.
    """
    stored = precision(activation_precision)
    rows = min(max_num_seqs, max_batched_tokens)
    widest = max(
        (
            max(_mixer_width(layer.mixer), _mlp_width(spec, layer.mlp), _mixer_width(layer.parallel_ssm))
            for layer in spec.layers
        ),
        default=0,
    )
    in_layers = stored.nbytes((max_batched_tokens, 2 * spec.hidden_size + widest))
    in_head = stored.nbytes((max_batched_tokens, spec.hidden_size)) + precision(logits_precision).nbytes(
        (rows, spec.vocab_size)
    )
    return max(in_layers, in_head)


def _mixer_width(mixer: Mixer | None) -> int:
    match mixer:
        case Attention():
            q, kv = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * (mixer.head_dim + mixer.value_dim)
            return q * (2 if mixer.output_gate else 1) + kv + mixer.num_heads * mixer.value_dim
        case LatentAttention():
            q = mixer.num_heads * (mixer.nope_dim + mixer.rope_dim)
            expanded = mixer.num_heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim)
            return q + expanded + mixer.num_heads * mixer.v_dim + mixer.kv_lora_rank + mixer.rope_dim
        case LinearAttention():
            return 2 * mixer.num_k_heads * mixer.k_dim + 3 * mixer.num_v_heads * mixer.v_dim
        case StateSpace():
            return 3 * mixer.inner + 2 * mixer.groups * mixer.state + mixer.num_heads
        case NoMixer() | None:
            return 0


def _mlp_width(spec: ModelSpec, mlp: DenseMLP | MoE | NoMLP) -> int:
    match mlp:
        case DenseMLP():
            return mlp.intermediate * (3 if mlp.gated else 2)
        case MoE():
            per_row = mlp.intermediate * (3 if mlp.gated else 2) + spec.hidden_size
            return mlp.top_k * per_row + mlp.shared_intermediate * (3 if mlp.gated else 2) + mlp.num_experts
        case NoMLP():
            return 0
