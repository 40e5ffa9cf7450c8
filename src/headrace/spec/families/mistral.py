"""Mistral 7B and its successors; v0.1 slides a window over every layer, later ones set it to null."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    layer = Layer(p.attention(c, window=p.window(c, absent=4096)), p.mlp(c))
    return p.model(c, [layer] * p.num_layers(c), tied=False)
