"""Falcon 7B, 40B, 180B: multi-query or grouped heads, parallel attention, one or two norms."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    heads = c.integer("num_attention_heads", "n_head")
    hidden = p.hidden_size(c)
    grouped = c.flag("new_decoder_architecture", default=False)
    if grouped:
        kv_heads = c.integer("num_kv_heads", default=heads)
    else:
        kv_heads = 1 if c.flag("multi_query", default=True) else heads
    c = c.with_defaults({"num_key_value_heads": kv_heads})
    bias = c.flag("bias", default=False)
    parallel = c.flag("parallel_attn", default=True)
    norms = c.integer("num_ln_in_parallel_attn", default=2) if grouped else 1 if parallel else 2
    layer = Layer(
        p.attention(c, qkv_bias=bias, out_bias=bias, rotary=not c.flag("alibi", default=False)),
        p.mlp(
            c,
            gated=False,
            bias=bias,
            width=c.integer("ffn_hidden_size", default=4 * hidden),
            act=p.activation(c, "activation", default="gelu"),
        ),
        num_norms=norms,
    )
    return p.model(
        c,
        [layer] * p.num_layers(c),
        tied=True,
        max_context=p.max_context(c, default=2048),
        norm_kind="layer",
        norm_bias=True,
        norm_eps=c.number("layer_norm_epsilon", default=1e-5),
    )
