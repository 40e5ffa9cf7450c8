"""DeepSeek-V2 and V2-Lite: MLA, softmax router without a correction bias."""

from headrace.spec.families._config import Config
from headrace.spec.families.deepseek_v3 import latent_model, routed_experts
from headrace.spec.model import ModelSpec


def build(c: Config) -> ModelSpec:
    experts = routed_experts(
        c,
        router_correction=False,
        scoring="softmax",
        normalize_top_k=c.flag("norm_topk_prob", default=False),
    )
    return latent_model(c, experts)
