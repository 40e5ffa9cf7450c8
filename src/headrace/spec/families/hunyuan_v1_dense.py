"""Hunyuan dense: Llama's block with a norm on each query and key head."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", default=False)
    layer = Layer(p.attention(c, qkv_bias=bias, out_bias=bias, qk_norm="head"), p.mlp(c))
    return p.model(c, [layer] * p.num_layers(c), tied=False)
