"""Gemma 2: every other layer slides, soft-capped scores and logits, four norms."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    kinds = p.layer_types(c, p.num_layers(c), lambda i: p.FULL if i % 2 else p.SLIDING, (p.FULL, p.SLIDING))
    bias = c.flag("attention_bias", default=False)
    size = p.window(c, default=4096)
    feed_forward = p.mlp(c, act=p.activation(c, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"))
    layers = [
        Layer(
            p.attention(
                c,
                window=size if kind == p.SLIDING else None,
                qkv_bias=bias,
                out_bias=bias,
                softcap=_cap(c, "attn_logit_softcapping", 50.0),
                scale=c.number("query_pre_attn_scalar", default=256.0) ** -0.5,
            ),
            feed_forward,
            num_norms=4,
        )
        for kind in kinds
    ]
    return p.model(
        c,
        layers,
        tied=True,
        norm_offset=True,
        embedding_scale=p.hidden_size(c) ** 0.5,
        logit_softcap=_cap(c, "final_logit_softcapping", 30.0),
    )


def _cap(c: Config, key: str, default: float) -> float | None:
    """A soft cap: null switches it off, an absent key means the family's value."""
    return c.number(key) if c.get(key) is not None else None if key in c.raw else default
