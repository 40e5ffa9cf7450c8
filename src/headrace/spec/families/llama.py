"""Llama 1–3 and everything that copied its config."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", default=False)
    layer = Layer(p.attention(c, qkv_bias=bias, out_bias=bias), p.mlp(c, bias=c.flag("mlp_bias", default=False)))
    return p.model(c, [layer] * p.num_layers(c), tied=False)
