"""Every weight of a model as a list of shapes. `headrace.spec.accounting` counts, sizes and multiplies over this list.

Projections are listed as checkpoints store them apart (q, k, v, gate, up); fused ones have the same elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Literal, assert_never, get_args

import msgspec

from headrace.spec.model import (
    Attention,
    DenseMLP,
    FeedForward,
    LatentAttention,
    Layer,
    LinearAttention,
    Mixer,
    ModelSpec,
    MoE,
    NoMixer,
    NoMLP,
    StateSpace,
)

Part = Literal[
    "embedding",
    "lm_head",
    "attention",
    "mixer",
    "mlp",
    "experts",
    "shared_experts",
    "router",
    "norms",
    "extra",
    "mtp",
]
PARTS: tuple[Part, ...] = get_args(Part)


class Weight(msgspec.Struct, frozen=True):
    """`copies` tensors of one `shape` (out, in for a matrix). `layer` is -1 outside the layers.

    `linear`: a token is multiplied by it (2 FLOPs per element), and quantizers apply. `part` is the part it is counted in;
    `role` differs only in MTP layers, where `part` is `mtp` and `role` what it would be in a main layer.
    `active`: how many of the copies one token uses.
    """

    part: Part
    role: Part
    layer: int
    shape: tuple[int, ...]
    linear: bool
    copies: int = 1
    active: int = 1

    @property
    def elements(self) -> int:
        return prod(self.shape) * self.copies

    @property
    def active_elements(self) -> int:
        return prod(self.shape) * self.active


class _Shape(msgspec.Struct, frozen=True):
    role: Part
    shape: tuple[int, ...]
    linear: bool = False
    copies: int = 1
    active: int = 1


def weights(spec: ModelSpec, *, mtp: bool = True) -> Iterator[Weight]:
    """All weights of the model, tied heads once. `mtp=False` leaves out the multi-token-prediction layers."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    yield Weight("embedding", "embedding", -1, (vocab, hidden), linear=False)
    if spec.learned_positions:
        yield Weight("embedding", "embedding", -1, (spec.learned_positions, hidden), linear=False)
    for index, layer in enumerate(spec.layers):
        for s in _layer(spec, layer):
            yield Weight(s.role, s.role, index, s.shape, s.linear, s.copies, s.active)
    if spec.final_norm:
        for _ in range(_norm_vectors(spec)):
            yield Weight("norms", "norms", -1, (hidden,), linear=False)
    if not spec.tied_embeddings:
        yield Weight("lm_head", "lm_head", -1, (vocab, hidden), linear=True)
    if spec.lm_head_bias:
        yield Weight("lm_head", "lm_head", -1, (vocab,), linear=False)
    for name, count in spec.extra_parameters:
        # Tables are looked up; whatever else a model adds is applied to every token.
        yield Weight("extra", "extra", -1, (count,), linear=not name.endswith("_embeddings"))
    if mtp:
        for layer in spec.mtp_layers:
            for s in _mtp(spec, layer):
                yield Weight("mtp", s.role, -1, s.shape, s.linear, s.copies, s.active)


def _norm_vectors(spec: ModelSpec) -> int:
    return 2 if spec.norm_bias else 1


def _mtp(spec: ModelSpec, layer: Layer) -> Iterator[_Shape]:
    """One multi-token-prediction layer: a block, the projection of [embedding; hidden] and three norms.

    Embedding and head are shared with the model (DeepSeek-V3 technical report, section 2.2).
    """
    yield _Shape("mlp", (spec.hidden_size, 2 * spec.hidden_size), True)
    for _ in range(3):
        yield _Shape("norms", (spec.hidden_size,))
    yield from _layer(spec, layer)


def _layer(spec: ModelSpec, layer: Layer) -> Iterator[_Shape]:
    for _ in range(layer.num_norms * _norm_vectors(spec)):
        yield _Shape("norms", (spec.hidden_size,))
    yield from _mixer(spec.hidden_size, layer.mixer)
    if layer.parallel_ssm is not None:
        yield from _mixer(spec.hidden_size, layer.parallel_ssm)
    yield from _feed_forward(spec.hidden_size, layer.mlp)


def _linear(role: Part, out: int, into: int, *, bias: bool = False) -> Iterator[_Shape]:
    yield _Shape(role, (out, into), True)
    if bias:
        yield _Shape(role, (out,))


def _mixer(hidden: int, mixer: Mixer) -> Iterator[_Shape]:
    match mixer:
        case Attention():
            yield from _attention(hidden, mixer)
        case LatentAttention():
            yield from _latent(hidden, mixer)
        case LinearAttention():
            yield from _linear_attention(hidden, mixer)
        case StateSpace():
            yield from _state_space(hidden, mixer)
        case NoMixer():
            return
        case _:
            assert_never(mixer)


def _attention(hidden: int, a: Attention) -> Iterator[_Shape]:
    q_dim, k_dim, v_dim = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.value_dim
    yield from _linear("attention", q_dim * (2 if a.output_gate else 1), hidden, bias=a.qkv_bias)
    if a.kv_source is None:
        yield from _linear("attention", k_dim, hidden, bias=a.qkv_bias)
        if not a.value_from_key:
            yield from _linear("attention", v_dim, hidden, bias=a.qkv_bias)
    yield from _linear("attention", hidden, a.num_heads * a.value_dim, bias=a.out_bias)
    if a.qk_norm != "none":
        full = a.qk_norm == "full"
        yield _Shape("norms", (q_dim if full else a.head_dim,))
        if a.kv_source is None:
            yield _Shape("norms", (k_dim if full else a.head_dim,))
    if a.sinks:
        yield _Shape("attention", (a.num_heads,))


def _latent(hidden: int, a: LatentAttention) -> Iterator[_Shape]:
    q_dim = a.num_heads * (a.nope_dim + a.rope_dim)
    if a.q_lora_rank is None:
        yield from _linear("attention", q_dim, hidden)
    else:
        yield from _linear("attention", a.q_lora_rank, hidden, bias=a.qkv_bias)
        yield _Shape("norms", (a.q_lora_rank,))
        yield from _linear("attention", q_dim, a.q_lora_rank)
    yield from _linear("attention", a.kv_lora_rank + a.rope_dim, hidden, bias=a.qkv_bias)
    yield _Shape("norms", (a.kv_lora_rank,))
    yield from _linear("attention", a.num_heads * (a.nope_dim + a.v_dim), a.kv_lora_rank)
    yield from _linear("attention", hidden, a.num_heads * a.v_dim, bias=a.qkv_bias)
    if (indexer := a.indexer) is not None and not indexer.shared:
        # Queries from the query latent, one key per token (LayerNorm with bias), one weight per head.
        yield from _linear("attention", indexer.num_heads * indexer.head_dim, a.q_lora_rank or hidden)
        yield from _linear("attention", indexer.head_dim, hidden)
        yield from _linear("attention", indexer.num_heads, hidden)
        yield _Shape("norms", (indexer.head_dim,))
        yield _Shape("norms", (indexer.head_dim,))


def _linear_attention(hidden: int, a: LinearAttention) -> Iterator[_Shape]:
    k_dim, v_dim = a.num_k_heads * a.k_dim, a.num_v_heads * a.v_dim
    match a.flavour:
        case "gated_delta":
            # q, k, v, z; b and a per value head; depthwise convolution over q, k, v; A, dt; norm per head.
            yield from _linear("mixer", 2 * k_dim + 2 * v_dim, hidden)
            yield from _linear("mixer", 2 * a.num_v_heads, hidden)
            yield _Shape("mixer", (2 * k_dim + v_dim, a.conv_kernel))
            yield _Shape("mixer", (a.num_v_heads,))
            yield _Shape("mixer", (a.num_v_heads,))
            yield _Shape("norms", (a.v_dim,))
            yield from _linear("mixer", hidden, v_dim)
        case "kimi_delta":
            # q, k, v with a convolution each; low-rank decay (f) and output gate (g); beta; A, dt; norm per head.
            yield from _linear("mixer", 2 * k_dim + v_dim, hidden)
            yield _Shape("mixer", (2 * k_dim + v_dim, a.conv_kernel))
            yield from _linear("mixer", a.k_dim, hidden)
            yield from _linear("mixer", k_dim, a.k_dim)
            yield from _linear("mixer", a.num_v_heads, hidden)
            yield from _linear("mixer", a.v_dim, hidden)
            yield from _linear("mixer", v_dim, a.v_dim)
            yield _Shape("mixer", (a.num_k_heads,))
            yield _Shape("mixer", (k_dim,))
            yield _Shape("norms", (a.v_dim,))
            yield from _linear("mixer", hidden, v_dim)
        case "lightning":
            # q, k, v; output gate; norm over all heads.
            yield from _linear("mixer", 2 * k_dim + v_dim, hidden)
            yield from _linear("mixer", v_dim, hidden)
            yield _Shape("norms", (v_dim,))
            yield from _linear("mixer", hidden, v_dim)
        case _:
            assert_never(a.flavour)


def _state_space(hidden: int, s: StateSpace) -> Iterator[_Shape]:
    if s.version == 2:
        conv = s.inner + 2 * s.groups * s.state
        yield from _linear("mixer", s.inner + conv + s.num_heads, hidden, bias=s.proj_bias)
        for _ in range(3):  # A, D and the bias of dt
            yield _Shape("mixer", (s.num_heads,))
    else:
        conv = s.inner
        yield from _linear("mixer", 2 * s.inner, hidden, bias=s.proj_bias)
        yield from _linear("mixer", s.dt_rank + 2 * s.state, s.inner)
        yield from _linear("mixer", s.inner, s.dt_rank, bias=True)
        yield _Shape("mixer", (s.inner, s.state))
        yield _Shape("mixer", (s.inner,))
        if s.inner_norms:
            for width in (s.dt_rank, s.state, s.state):
                yield _Shape("norms", (width,))
    yield _Shape("mixer", (conv, s.conv_kernel))
    if s.conv_bias:
        yield _Shape("mixer", (conv,))
    if s.version == 2 and s.gated_norm:
        yield _Shape("norms", (s.inner,))
    yield from _linear("mixer", hidden, s.inner, bias=s.proj_bias)


def _feed_forward(hidden: int, mlp: FeedForward) -> Iterator[_Shape]:
    match mlp:
        case DenseMLP():
            for _ in range(2 if mlp.gated else 1):
                yield from _linear("mlp", mlp.intermediate, hidden, bias=mlp.bias)
            yield from _linear("mlp", hidden, mlp.intermediate, bias=mlp.bias)
        case MoE():
            yield from _experts(hidden, mlp)
        case NoMLP():
            return
        case _:
            assert_never(mlp)


def _experts(hidden: int, m: MoE) -> Iterator[_Shape]:
    yield from _linear("router", m.num_experts, hidden, bias=m.router_bias)
    if m.router_correction:
        yield _Shape("router", (m.num_experts,))
    shapes = [(m.intermediate, hidden)] * (2 if m.gated else 1) + [(hidden, m.intermediate)]
    for shape in shapes:
        yield _Shape("experts", shape, True, m.num_experts, m.top_k)
        if m.bias:
            yield _Shape("experts", shape[:1], False, m.num_experts, m.top_k)
    if m.shared_intermediate:
        for shape in [(m.shared_intermediate, hidden)] * (2 if m.gated else 1) + [(hidden, m.shared_intermediate)]:
            yield _Shape("shared_experts", shape, True)
        if m.shared_gate:
            yield _Shape("router", (1, hidden), True)
