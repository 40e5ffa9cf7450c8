"""Gemma 4 (text, dense): five sliding layers to one full; full layers have fewer, wider KV heads.

Where `attention_k_eq_v` is set, full layers take their values from the key projection. The cache holds both all the same,
and so does this geometry, which counts a value projection too many per full layer (0.4 % of the 31B model).
"""

from headrace.base.errors import UnsupportedModel
from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Attention, Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    for key, what in (("enable_moe_block", "experts"), ("hidden_size_per_layer_input", "per-layer embeddings")):
        if c.get(key):
            raise UnsupportedModel(f"Gemma 4 with {what} is not supported", field=key)
    if c.integer("num_kv_shared_layers", default=0, minimum=0):
        raise UnsupportedModel("Gemma 4 with shared KV layers is not supported", field="num_kv_shared_layers")
    count = p.num_layers(c)
    kinds = p.layer_types(c, count, p.every(6), (p.FULL, p.SLIDING))
    feed_forward = p.mlp(c, act=p.activation(c, "hidden_activation", default="gelu_pytorch_tanh"))
    by_kind = {p.SLIDING: _sliding(c), p.FULL: _full(c)}
    return p.model(
        c,
        [Layer(by_kind[kind], feed_forward, num_norms=4) for kind in kinds],
        tied=True,
        norm_offset=False,
        embedding_scale=p.hidden_size(c) ** 0.5,
        logit_softcap=c.number("final_logit_softcapping", default=None),
    )


def _sliding(c: Config) -> Attention:
    heads, kv_heads, head_dim = p.head_counts(c)
    rope = p.rope(c, head_dim, layer_type=p.SLIDING, theta=1e4)
    return Attention(heads, kv_heads, head_dim, window=p.window(c, default=1024), qk_norm="head", scale=1.0, rope=rope)


def _full(c: Config) -> Attention:
    heads = c.integer("num_attention_heads")
    kv_heads = c.integer("num_global_key_value_heads", "num_key_value_heads")
    head_dim = c.integer("global_head_dim", "head_dim")
    # "proportional" rope rotates a part of the dimensions and stretches nothing.
    rope = p.rope(c.without("rope_parameters"), head_dim, layer_type=p.FULL, theta=1e6)
    return Attention(heads, kv_heads, head_dim, qk_norm="head", scale=1.0, rope=rope)
