"""Granite 4: Mamba-2 layers with a few attention layers, a shared MLP, and experts where there are any."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.families.bamba import mamba2
from headrace.spec.families.granite import multipliers
from headrace.spec.model import FeedForward, Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    kinds = p.layer_types(c, p.num_layers(c), p.MAMBA, (p.MAMBA, "attention", p.LINEAR, p.FULL))
    bias = c.flag("attention_bias", default=False)
    attention = p.attention(
        c,
        qkv_bias=bias,
        out_bias=bias,
        rotary=c.text("position_embedding_type", default="nope") == "rope",
        scale=c.number("attention_multiplier", default=1.0),
    )
    state_space = mamba2(c)
    shared = c.integer("shared_intermediate_size", default=1024)
    feed_forward: FeedForward
    if c.integer("num_local_experts", default=0, minimum=0):
        feed_forward = p.moe(
            c,
            intermediate=c.integer("intermediate_size"),
            shared_intermediate=shared,
            scoring="softmax_after_top_k",
        )
    else:
        feed_forward = p.mlp(c, width=shared)
    layers = [Layer(attention if kind in ("attention", p.FULL) else state_space, feed_forward) for kind in kinds]
    return p.model(c, layers, tied=False, **multipliers(c))
