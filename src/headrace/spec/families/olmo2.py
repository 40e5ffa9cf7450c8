"""OLMo 2: norms after each part, and over all queries and all keys."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", default=False)
    layer = Layer(p.attention(c, qkv_bias=bias, out_bias=bias, qk_norm="full"), p.mlp(c))
    return p.model(c, [layer] * p.num_layers(c), tied=False, norm_eps=c.number("rms_norm_eps", default=1e-5))
