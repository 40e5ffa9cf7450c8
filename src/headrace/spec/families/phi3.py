"""Phi-3, Phi-3.5 and Phi-4-mini: fused QKV and gate/up in the checkpoint, LongRoPE, often a window."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    layer = Layer(p.attention(c, window=p.window(c)), p.mlp(c))
    return p.model(c, [layer] * p.num_layers(c), tied=False, norm_eps=c.number("rms_norm_eps", default=1e-5))
