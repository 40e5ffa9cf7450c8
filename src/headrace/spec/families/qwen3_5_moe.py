"""Qwen3.5 mixture of experts: Qwen3-Next's layers, every one sparse."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.families.qwen3_next import hybrid, shared_expert_moe
from headrace.spec.model import ModelSpec


def build(c: Config) -> ModelSpec:
    experts = shared_expert_moe(c)
    return hybrid(c, [experts] * p.num_layers(c), mtp_feed_forward=experts)
