"""OLMo: Llama's block with LayerNorms that have no weights (none are counted)."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", default=False)
    layer = Layer(p.attention(c, qkv_bias=bias, out_bias=bias), p.mlp(c), num_norms=0)
    return p.model(c, [layer] * p.num_layers(c), tied=False, norm_kind="layer", norm_eps=1e-5, final_norm=False)
