"""GLM-4.5 and later: GQA with rope on half of each head, DeepSeek-V3's router, MTP layers in the checkpoint."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.families.deepseek_v3 import routed_experts
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    attention = p.attention(
        c,
        qkv_bias=c.flag("attention_bias", default=False),
        qk_norm="head" if c.flag("use_qk_norm", default=False) else "none",
        partial=0.5,
    )
    experts = routed_experts(c)
    dense_first = c.integer("first_k_dense_replace", default=1, minimum=0)
    layers = [Layer(attention, p.mlp(c) if i < dense_first else experts) for i in range(p.num_layers(c))]
    extra = c.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, minimum=0)
    return p.model(c, layers, tied=False, mtp_layers=(Layer(attention, experts),) * extra)
