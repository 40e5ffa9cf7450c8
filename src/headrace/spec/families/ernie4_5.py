"""ERNIE 4.5 dense: Llama's block with interleaved rope, tied."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("use_bias", default=False)
    layer = Layer(p.attention(c, qkv_bias=bias, out_bias=bias, theta=5e5, interleaved=True), p.mlp(c, bias=bias))
    return p.model(c, [layer] * p.num_layers(c), tied=True, norm_eps=c.number("rms_norm_eps", default=1e-5))
