"""Gemma 1: wide heads, GeGLU, RMSNorm of 1 + w, scaled and tied embeddings."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", default=False)
    # Releases that say "gelu" mean its tanh form.
    layer = Layer(p.attention(c, qkv_bias=bias, out_bias=bias), p.mlp(c, act="gelu_tanh"))
    return p.model(c, [layer] * p.num_layers(c), tied=True, norm_offset=True, embedding_scale=p.hidden_size(c) ** 0.5)
