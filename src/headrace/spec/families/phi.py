"""Phi-1, 1.5 and 2: parallel block under one LayerNorm, rope on half of each head, biases everywhere."""

from headrace.base.errors import UnsupportedModel
from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    if c.flag("qk_layernorm", default=False):
        raise UnsupportedModel("Phi with qk_layernorm is not supported", field="qk_layernorm")
    layer = Layer(
        p.attention(c, qkv_bias=True, out_bias=True, partial=0.5),
        p.mlp(c, gated=False, bias=True, act=p.activation(c, default="gelu_new")),
        num_norms=1,
    )
    return p.model(c, [layer] * p.num_layers(c), tied=False, norm_kind="layer", norm_bias=True, lm_head_bias=True)
