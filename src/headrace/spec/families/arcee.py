"""Arcee AFM: Llama's attention, an ungated MLP with squared ReLU."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", default=False)
    feed_forward = p.mlp(c, gated=False, bias=c.flag("mlp_bias", default=False), act=p.activation(c, default="relu2"))
    layer = Layer(p.attention(c, qkv_bias=bias, out_bias=bias), feed_forward)
    return p.model(c, [layer] * p.num_layers(c), tied=False)
