"""GPT-NeoX and Pythia: parallel residual, rope on a quarter of each head, LayerNorm, biases."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", default=True)
    layer = Layer(
        p.attention(c, qkv_bias=bias, out_bias=bias, partial=0.25),
        p.mlp(c, gated=False, bias=True, act=p.activation(c, default="gelu")),
    )
    return p.model(c, [layer] * p.num_layers(c), tied=False, norm_kind="layer", norm_bias=True)
