"""Phi-3.5-MoE: LayerNorm, two of sixteen experts by sparse mixing, optional biases."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", default=False)
    attention = p.attention(c, window=p.window(c), qkv_bias=bias, out_bias=bias, theta=1e6)
    experts = p.moe(c, intermediate=c.integer("intermediate_size"), normalize_top_k=False)
    return p.model(
        c,
        [Layer(attention, experts)] * p.num_layers(c),
        tied=False,
        norm_kind="layer",
        norm_bias=True,
        norm_eps=c.number("rms_norm_eps", default=1e-5),
        lm_head_bias=c.flag("lm_head_bias", default=False),
    )
