"""Seed-OSS: Llama's block with biased Q/K/V."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    attention = p.attention(
        c, qkv_bias=c.flag("attention_bias", default=True), out_bias=c.flag("attention_out_bias", default=False)
    )
    layer = Layer(attention, p.mlp(c, bias=c.flag("mlp_bias", default=False)))
    return p.model(c, [layer] * p.num_layers(c), tied=False)
