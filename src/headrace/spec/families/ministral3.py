"""Ministral 3: Mistral's block without a window, YaRN where the config does not say otherwise."""

from headrace.spec.families import mistral
from headrace.spec.families._config import Config
from headrace.spec.model import ModelSpec

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def build(c: Config) -> ModelSpec:
    window = {"sliding_window": c.integer("sliding_window", default=0, minimum=0)}
    if c.get("rope_parameters", "rope_scaling") is None:
        c = c.with_defaults({"rope_parameters": _YARN})
    return mistral.build(c.with_defaults(window))
