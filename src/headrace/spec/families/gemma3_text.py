"""Gemma 3 (text): five sliding layers to one full, each kind with its own rope; four norms; scaled, tied embeddings."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Attention, Layer, ModelSpec

# google/gemma-3-4b-it states only what differs from these in its text_config.
_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}


def build(c: Config) -> ModelSpec:
    c = c.with_defaults(_DEFAULTS)
    count = p.num_layers(c)
    pattern = c.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    kinds = p.layer_types(c, count, p.every(pattern), (p.FULL, p.SLIDING))
    by_kind = {kind: _attention(c, kind) for kind in (p.FULL, p.SLIDING)}
    feed_forward = p.mlp(c, act=p.activation(c, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"))
    return p.model(
        c,
        [Layer(by_kind[kind], feed_forward, num_norms=4) for kind in kinds],
        tied=True,
        norm_offset=True,
        embedding_scale=p.hidden_size(c) ** 0.5,
        logit_softcap=c.number("final_logit_softcapping", default=None),
    )


def _attention(c: Config, kind: str) -> Attention:
    heads, kv_heads, head_dim = p.head_counts(c)
    local = kind == p.SLIDING
    bias = c.flag("attention_bias", default=False)
    return Attention(
        heads,
        kv_heads,
        head_dim,
        window=p.window(c, default=4096) if local else None,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        softcap=c.number("attn_logit_softcapping", default=None),
        scale=c.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        rope=p.rope(
            c,
            head_dim,
            layer_type=kind,
            theta=1e4 if local else 1e6,
            scaled=not local,
            theta_keys=("rope_local_base_freq",) if local else ("rope_theta",),
        ),
    )
