"""MiMo-V2-Flash: every sixth layer and the first full, the others sliding with twice the key heads, and sinks; values are narrower
than keys, and experts are chosen by DeepSeek-V3's router."""

from headrace.base.errors import InvalidInput
from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.families.deepseek_v3 import routed_experts
from headrace.spec.model import Attention, Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    count = p.num_layers(c)
    slides, sparse = _pattern(c, count, "hybrid_layer_pattern"), _pattern(c, count, "moe_layer_freq")
    if slides is None:
        kinds = p.layer_types(c, count, lambda i: p.SLIDING if i and (i + 1) % 6 else p.FULL, (p.FULL, p.SLIDING))
        slides = [kind == p.SLIDING for kind in kinds]
    if sparse is None:
        listed = c.texts("mlp_layer_types")
        sparse = [i > 0 if listed is None else listed[i : i + 1] == ["sparse"] for i in range(count)]
    full, sliding = _full(c), _sliding(c)
    experts, dense = routed_experts(c), p.mlp(c)
    layers = [Layer(sliding if slides[i] else full, experts if sparse[i] else dense) for i in range(count)]
    return p.model(c, layers, tied=False)


def _full(c: Config) -> Attention:
    heads, head_dim = c.integer("num_attention_heads"), c.integer("head_dim", default=192)
    return Attention(
        heads,
        c.integer("num_key_value_heads"),
        head_dim,
        v_head_dim=c.integer("v_head_dim", default=128),
        qkv_bias=c.flag("attention_bias", default=False),
        sinks=c.flag("add_full_attention_sink_bias", default=False),
        rope=p.rope(c, head_dim, layer_type=p.FULL, theta=5e6, partial=0.334),
    )


def _sliding(c: Config) -> Attention:
    # The hub's config counts the tokens before the query; transformers' own `sliding_window` holds the query too.
    before = c.integer("sliding_window_size", default=None)
    head_dim = c.integer("swa_head_dim", "head_dim", default=192)
    return Attention(
        c.integer("swa_num_attention_heads", "num_attention_heads"),
        c.integer("swa_num_key_value_heads", default=2 * c.integer("num_key_value_heads")),
        head_dim,
        v_head_dim=c.integer("swa_v_head_dim", "v_head_dim", default=128),
        window=c.integer("sliding_window", default=129) if before is None else before + 1,
        qkv_bias=c.flag("attention_bias", default=False),
        sinks=c.flag("add_swa_attention_sink_bias", default=True),
        rope=p.rope(
            c, head_dim, layer_type=p.SLIDING, theta=1e4, partial=0.334, scaled=False, theta_keys=("swa_rope_theta",)
        ),
    )


def _pattern(c: Config, count: int, key: str) -> list[bool] | None:
    """One flag a layer where the config gives zeros and ones."""
    given = c.integers(key)
    if given is None:
        return None
    if len(given) < count:
        raise InvalidInput(f"{key} has {len(given)} entries for {count} layers", field=key)
    return [bool(value) for value in given[:count]]
