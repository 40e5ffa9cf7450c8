"""MiniMax-M2: full GQA with norms over all queries and keys, sigmoid router with a correction bias."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    head_dim = c.integer("head_dim", default=128)
    partial = c.integer("rotary_dim", default=head_dim) / head_dim
    attention = p.attention(c, qk_norm="full", theta=5e6, partial=partial)
    experts = p.moe(c, intermediate=c.integer("intermediate_size"), scoring="sigmoid", router_correction=True)
    return p.model(c, [Layer(attention, experts)] * p.num_layers(c), tied=False)
