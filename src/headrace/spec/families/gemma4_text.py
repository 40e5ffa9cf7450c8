"""Gemma 4 (text): five sliding layers to one full; full layers have fewer, wider KV heads; optional experts beside the MLP,
per-layer embeddings, and later layers that reuse earlier keys and values."""

import math

from msgspec.structs import replace

from headrace.base.errors import InvalidInput
from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Attention, DenseMLP, Layer, ModelSpec, MoE, Rope

_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "vocab_size_per_layer_input": 262_144,
}


def build(c: Config) -> ModelSpec:
    # Silence means 256; null or 0 means that there are no per-layer embeddings.
    narrow = c.integer("hidden_size_per_layer_input", default=0, minimum=0) if _says(c) else 256
    c = c.with_defaults(_DEFAULTS)
    count = p.num_layers(c)
    hidden = p.hidden_size(c)
    kinds = p.layer_types(c, count, p.every(6), (p.FULL, p.SLIDING))
    kinds[-1] = p.FULL  # the last layer is full whatever the pattern says
    first_shared = count - c.integer("num_kv_shared_layers", default=0, minimum=0)
    by_kind = {p.SLIDING: _sliding(c), p.FULL: _full(c)}
    sparse = c.flag("enable_moe_block", default=False)
    # Four norms; the experts bring three and their router's scale, per-layer embeddings one.
    norms = 4 + (4 if sparse else 0) + (1 if narrow else 0)
    layers = []
    for i, kind in enumerate(kinds):
        mixer = by_kind[kind]
        if i >= first_shared:
            mixer = replace(mixer, kv_source=_source(kinds, first_shared, i))
        wide = c.flag("use_double_wide_mlp", default=False) and i >= first_shared
        layers.append(Layer(mixer, _feed_forward(c, sparse=sparse, wide=wide), num_norms=norms))
    extra: tuple[tuple[str, int], ...] = ()
    if narrow:
        extra = (
            ("per_layer_embeddings", c.integer("vocab_size_per_layer_input") * count * narrow),
            ("per_layer_projections", hidden * count * narrow + narrow + count * 2 * hidden * narrow),
        )
    return p.model(
        c,
        layers,
        tied=True,
        embedding_scale=hidden**0.5,
        logit_softcap=c.number("final_logit_softcapping", default=None),
        extra_parameters=extra,
    )


def _says(c: Config) -> bool:
    return "hidden_size_per_layer_input" in c.raw


def _source(kinds: list[str], first_shared: int, i: int) -> int:
    source = next((j for j in reversed(range(first_shared)) if kinds[j] == kinds[i]), None)
    if source is None:
        raise InvalidInput(f"no earlier {kinds[i]} layer for layer {i} to share", field="num_kv_shared_layers")
    return source


def _feed_forward(c: Config, *, sparse: bool, wide: bool) -> DenseMLP | MoE:
    act = p.activation(c, "hidden_activation", default="gelu_pytorch_tanh")
    width = c.integer("intermediate_size") * (2 if wide else 1)
    if not sparse:
        return p.mlp(c, width=width, act=act)
    # The dense MLP runs beside the experts, as a shared expert does; a scale per expert stands where others have a correction.
    return p.moe(
        c,
        intermediate=c.integer("moe_intermediate_size"),
        shared_intermediate=width,
        router_correction=True,
        activation=act,
    )


def _sliding(c: Config) -> Attention:
    heads, kv_heads, head_dim = p.head_counts(c)
    bias = c.flag("attention_bias", default=False)
    return Attention(
        heads,
        kv_heads,
        head_dim,
        window=p.window(c, default=512),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        scale=1.0,
        rope=p.rope(c, head_dim, layer_type=p.SLIDING, theta=1e4),
    )


def _full(c: Config) -> Attention:
    heads = c.integer("num_attention_heads")
    from_key = c.flag("attention_k_eq_v", default=False)
    kv_heads = c.integer("num_key_value_heads")
    if from_key:
        kv_heads = c.integer("num_global_key_value_heads", default=kv_heads)
    if heads % kv_heads:
        raise InvalidInput(f"{kv_heads} KV heads do not divide {heads}", field="num_global_key_value_heads")
    bias = c.flag("attention_bias", default=False)
    head_dim = c.integer("global_head_dim")
    return Attention(
        heads,
        kv_heads,
        head_dim,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        scale=1.0,
        rope=_proportional(c, head_dim),
        value_from_key=from_key,
    )


def _proportional(c: Config, head_dim: int) -> Rope:
    """Rope of the whole head whose slowest pairs do not turn: an infinite divisor stops them."""
    table = (c.table("rope_parameters") or {}).get(p.FULL)
    given = Config(table if isinstance(table, dict) else {})
    if given.text("rope_type", default="proportional") != "proportional":
        return p.rope(c, head_dim, layer_type=p.FULL, theta=1e6)
    turning = int(given.number("partial_rotary_factor", default=0.25) * head_dim // 2)
    factor = given.number("factor", default=1.0)
    if not 0 < turning <= head_dim // 2 or factor <= 0:
        raise InvalidInput("partial_rotary_factor or factor is out of range", field="rope_parameters.full_attention")
    divisors = (factor,) * turning + (math.inf,) * (head_dim // 2 - turning)
    return Rope(given.number("rope_theta", default=1e6), head_dim, freq_factors=divisors)
