"""Qwen3.5 dense: Qwen3-Next's layers with a plain MLP."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.families.qwen3_next import hybrid
from headrace.spec.model import ModelSpec


def build(c: Config) -> ModelSpec:
    feed_forward = p.mlp(c)
    return hybrid(c, [feed_forward] * p.num_layers(c), mtp_feed_forward=feed_forward)
