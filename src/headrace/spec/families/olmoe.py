"""OLMoE: OLMo 2's norms on queries and keys, 64 small experts."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", default=False)
    attention = p.attention(c, qkv_bias=bias, out_bias=bias, qk_norm="full")
    experts = p.moe(
        c, intermediate=c.integer("intermediate_size"), normalize_top_k=c.flag("norm_topk_prob", default=False)
    )
    return p.model(
        c, [Layer(attention, experts)] * p.num_layers(c), tied=False, norm_eps=c.number("rms_norm_eps", default=1e-5)
    )
