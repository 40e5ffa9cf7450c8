"""GLM-4 (2024): biased Q/K/V, interleaved rope on half of each head."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    return glm(c, num_norms=2)


def glm(c: Config, *, num_norms: int) -> ModelSpec:
    attention = p.attention(c, qkv_bias=c.flag("attention_bias", default=True), partial=0.5, interleaved=True)
    return p.model(c, [Layer(attention, p.mlp(c), num_norms=num_norms)] * p.num_layers(c), tied=False)
