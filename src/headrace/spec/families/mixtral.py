"""Mixtral: Mistral's attention, every layer sparse, softmax over all experts renormalized over the chosen."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    layer = Layer(p.attention(c, window=p.window(c), theta=1e6), p.moe(c, intermediate=c.integer("intermediate_size")))
    return p.model(c, [layer] * p.num_layers(c), tied=False, norm_eps=c.number("rms_norm_eps", default=1e-5))
