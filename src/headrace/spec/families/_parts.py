"""The building blocks that families share: rope, softmax attention, feed-forward and the assembly of a `ModelSpec`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

from msgspec.structs import replace

from headrace.base.errors import InvalidInput, UnsupportedModel
from headrace.spec.families._config import Config
from headrace.spec.model import Activation, Attention, DenseMLP, Layer, ModelSpec, MoE, Rope, RopeScaling

FULL, SLIDING, CHUNKED, LINEAR, MAMBA = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "mamba",
)

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

_MAX_LAYERS = 10_000


def activation(c: Config, *keys: str, default: str = "silu") -> Activation:
    """The activation named by the first of `keys` (default `hidden_act`)."""
    keys = keys or ("hidden_act",)
    name = c.text(*keys, default=default)
    if name not in _ACTIVATIONS:
        raise InvalidInput(f"{keys[0]}: unknown activation {name!r}", field=keys[0])
    return _ACTIVATIONS[name]


def num_layers(c: Config, *keys: str) -> int:
    count = c.integer(*(keys or ("num_hidden_layers", "n_layer", "num_layers")))
    if count > _MAX_LAYERS:
        raise InvalidInput(f"num_hidden_layers is absurdly large: {count}", field="num_hidden_layers")
    return count


def layer_types(c: Config, count: int, default: str | Callable[[int], str], known: Sequence[str]) -> list[str]:
    """`layer_types` of the config, checked, or `default` (a name, or a rule from the layer's index) where it is absent."""
    given = c.texts("layer_types")
    if given is None:
        return [default if isinstance(default, str) else default(i) for i in range(count)]
    if len(given) < count:
        raise InvalidInput(f"layer_types has {len(given)} entries for {count} layers", field="layer_types")
    for kind in given:
        if kind not in known:
            raise InvalidInput(f"layer_types: unknown kind {kind!r}", field="layer_types")
    return given[:count]


def every(n: int, *, full: str = FULL, other: str = SLIDING) -> Callable[[int], str]:
    """The rule "each n-th layer is full": layers n-1, 2n-1, …"""
    return lambda i: full if (i + 1) % n == 0 else other


def hidden_size(c: Config) -> int:
    return c.integer("hidden_size", "n_embd", "d_model", "dim")


def head_counts(c: Config) -> tuple[int, int, int]:
    """Query heads, KV heads and head dimension; contradictions are an InvalidInput."""
    heads = c.integer("num_attention_heads", "n_head", "num_heads")
    kv_heads = c.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise InvalidInput(
            f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}", field="num_key_value_heads"
        )
    head_dim = c.integer("head_dim", default=None)
    if head_dim is None:
        hidden = hidden_size(c)
        if hidden % heads:
            raise InvalidInput(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
                field="hidden_size",
                remedy="give head_dim",
            )
        head_dim = hidden // heads
    return heads, kv_heads, head_dim


def max_context(c: Config, default: int | None = None) -> int:
    """`max_position_embeddings`, or what YaRN stretches the original context to where that is more.

    Linear and dynamic scaling do not extend it: published configs disagree on whether the figure already includes the
    factor, and the smaller reading is the safe one.
    """
    keys = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
    length = c.integer(*keys) if default is None else c.integer(*keys, default=default)
    table = c.table("rope_parameters") or c.table("rope_scaling") or {}
    if table.get("rope_type", table.get("type")) == "yarn":
        inner = Config(table)
        original = inner.integer("original_max_position_embeddings", default=0, minimum=0)
        length = max(length, int(original * inner.number("factor", default=1.0)))
    return length


def rope(
    c: Config,
    dim: int,
    *,
    layer_type: str | None = None,
    theta: float = 10_000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    scaled: bool = True,
    theta_keys: Sequence[str] = ("rope_theta", "rotary_emb_base"),
) -> Rope:
    """Rotary embedding of heads of `dim`.

    Reads `rope_parameters` (flat, or keyed by `layer_type`) or the older `rope_theta`, `rope_scaling` and
    `partial_rotary_factor`/`rotary_pct`. `theta`, `partial`: what the family uses where the config is silent.
    `scaled=False` ignores `rope_scaling` (local layers of models whose scaling is for global layers only).
    """
    parameters = c.table("rope_parameters")
    if parameters is not None and layer_type is not None and isinstance(parameters.get(layer_type), dict):
        parameters = parameters[layer_type]
    elif parameters is not None and any(isinstance(v, dict) for v in parameters.values()):
        raise InvalidInput(f"rope_parameters has no entry for {layer_type or FULL!r}", field="rope_parameters")
    old = c.table("rope_scaling") if scaled else None
    table = Config(parameters or old or {})
    base = table.number("rope_theta", default=None)
    if base is None:
        base = c.number(*theta_keys, default=theta)
    fraction = table.number("partial_rotary_factor", default=None)
    if fraction is None:
        fraction = c.number("partial_rotary_factor", "rotary_pct", "rope_pct", default=partial)
    if not 0 < base < math.inf or not 0 < fraction <= 1:
        raise InvalidInput(f"rope_theta {base} or partial_rotary_factor {fraction} is out of range", field="rope_theta")
    rotary = int(dim * fraction)
    if rotary < 2 or rotary % 2:
        raise InvalidInput(f"rotary dimension {rotary} is not an even number from 2", field="partial_rotary_factor")
    return Rope(theta=base, dim=rotary, interleaved=interleaved, scaling=rope_scaling(c, table))


def rope_scaling(c: Config, table: Config) -> RopeScaling:
    """The scaling described by one `rope_scaling` or `rope_parameters` object; types we do not know are refused."""
    kind = table.text("rope_type", "type", default="default")
    # mrope gives text tokens three equal positions, which is plain rope.
    kind = {"default": "none", "mrope": "none", "su": "longrope"}.get(kind, kind)
    if kind not in ("none", "linear", "dynamic", "llama3", "yarn", "longrope"):
        raise UnsupportedModel(f"rope scaling type {kind!r} is not supported", field="rope_scaling")
    if kind == "none":
        return RopeScaling()
    longest = c.integer("max_position_embeddings", default=0, minimum=0)
    original = table.integer("original_max_position_embeddings", default=None)
    if original is None:
        original = c.integer("original_max_position_embeddings", default=longest, minimum=0)
    factor = table.number("factor", default=None)
    if kind == "longrope":
        if factor is None or c.get("original_max_position_embeddings") is not None:
            factor = longest / original if original else 1.0
        half = {key: _factors(table, key) for key in ("short_factor", "long_factor")}
        return RopeScaling(
            "longrope",
            factor=factor,
            original_max_context=original,
            attention_factor=table.number("attention_factor", default=None),
            short_factors=half["short_factor"],
            long_factors=half["long_factor"],
        )
    if factor is None:
        raise InvalidInput(f"rope_scaling of type {kind} needs a factor", field="rope_scaling.factor")
    if factor < 1:
        raise InvalidInput(f"rope_scaling factor {factor} is below 1", field="rope_scaling.factor")
    return RopeScaling(
        cast(Any, kind),
        factor=factor,
        original_max_context=original,
        low_freq_factor=table.number("low_freq_factor", default=1.0),
        high_freq_factor=table.number("high_freq_factor", default=4.0),
        beta_fast=table.number("beta_fast", default=32.0),
        beta_slow=table.number("beta_slow", default=1.0),
        attention_factor=table.number("attention_factor", default=None),
        mscale=table.number("mscale", default=None),
        mscale_all_dim=table.number("mscale_all_dim", default=None),
        truncate=table.flag("truncate", default=True),
    )


def _factors(table: Config, key: str) -> tuple[float, ...]:
    values = table.get(key)
    if not isinstance(values, list) or not all(isinstance(v, int | float) for v in values):
        raise InvalidInput(f"rope_scaling.{key} must be a list of numbers", field=f"rope_scaling.{key}")
    return tuple(float(v) for v in values)


def attention(
    c: Config,
    *,
    window: int | None = None,
    chunked: bool = False,
    layer_type: str | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: Literal["none", "head", "full"] = "none",
    rotary: bool = True,
    theta: float = 10_000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    output_gate: bool = False,
) -> Attention:
    """Softmax attention from the usual keys; what a family fixes is given by keyword."""
    heads, kv_heads, head_dim = head_counts(c)
    return Attention(
        heads,
        kv_heads,
        head_dim,
        window=window,
        chunked=chunked,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        sinks=sinks,
        output_gate=output_gate,
        softcap=softcap,
        scale=scale,
        rope=rope(c, head_dim, layer_type=layer_type, theta=theta, partial=partial, interleaved=interleaved)
        if rotary
        else None,
    )


def mlp(
    c: Config, *, gated: bool = True, bias: bool = False, width: int | None = None, act: Activation | None = None
) -> DenseMLP:
    return DenseMLP(
        c.integer("intermediate_size") if width is None else width,
        gated=gated,
        bias=bias,
        activation=activation(c) if act is None else act,
    )


def moe(c: Config, **fields: Any) -> MoE:
    """Experts from the usual keys; `fields` override those of `MoE`."""
    experts = c.integer("num_experts", "num_local_experts", "n_routed_experts")
    top_k = c.integer("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
    if top_k > experts:
        raise InvalidInput(f"num_experts_per_tok {top_k} exceeds the {experts} experts", field="num_experts_per_tok")
    values: dict[str, Any] = {"num_experts": experts, "top_k": top_k}
    if "intermediate" not in fields:
        values["intermediate"] = c.integer("moe_intermediate_size", "intermediate_size")
    if "activation" not in fields:
        values["activation"] = activation(c)
    return MoE(**(values | fields))


def window(c: Config, *, default: int | None = None, absent: int | None = None) -> int | None:
    """`sliding_window`; null or 0 means `default`, none unless given. `absent` is for a config that lacks the key."""
    if "sliding_window" not in c.raw and absent is not None:
        return absent
    size = c.integer("sliding_window", default=default or 0, minimum=0)
    return size or None


def model(c: Config, layers: Sequence[Layer], *, tied: bool, **fields: Any) -> ModelSpec:
    """Assemble a spec: `tied` is the family's default of `tie_word_embeddings`; `fields` override those of `ModelSpec`."""
    values: dict[str, Any] = {
        "name": c.name,
        "model_type": c.model_type,
        "vocab_size": c.integer("vocab_size"),
        "hidden_size": hidden_size(c),
        "layers": tuple(layers),
        "tied_embeddings": c.flag("tie_word_embeddings", default=tied),
        "norm_eps": c.number(
            "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", default=1e-6
        ),
    }
    if "max_context" not in fields:
        values["max_context"] = max_context(c)
    return ModelSpec(**(values | fields))


def without_rope(layer: Layer) -> Layer:
    """The same layer with no position embedding (NoPE)."""
    if not isinstance(layer.mixer, Attention):
        return layer
    return replace(layer, mixer=replace(layer.mixer, rope=None))
