"""Ministral: Mistral's block; `layer_types` says which layers slide."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    size = p.window(c, absent=4096)
    kinds = p.layer_types(c, p.num_layers(c), p.SLIDING if size else p.FULL, (p.FULL, p.SLIDING))
    return p.model(
        c, [Layer(p.attention(c, window=size if kind == p.SLIDING else None), p.mlp(c)) for kind in kinds], tied=False
    )
