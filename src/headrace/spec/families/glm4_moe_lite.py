"""GLM-4.7-Flash: MLA with DeepSeek-V3's router; the first layer is dense."""

from headrace.spec.families._config import Config
from headrace.spec.families.deepseek_v3 import latent_model, routed_experts
from headrace.spec.model import ModelSpec


def build(c: Config) -> ModelSpec:
    mtp = c.integer("num_nextn_predict_layers", default=0, minimum=0)
    return latent_model(c.with_defaults({"first_k_dense_replace": 1}), routed_experts(c), mtp=mtp)
