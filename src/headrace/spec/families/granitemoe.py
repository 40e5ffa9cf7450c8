"""Granite mixture of experts: softmax over the chosen experts only."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.families.granite import multipliers
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", default=False)
    attention = p.attention(c, qkv_bias=bias, out_bias=bias, scale=c.number("attention_multiplier", default=1.0))
    experts = p.moe(c, intermediate=c.integer("intermediate_size"), scoring="softmax_after_top_k")
    return p.model(c, [Layer(attention, experts)] * p.num_layers(c), tied=False, **multipliers(c))
