"""MiniMax-Text-01: lightning attention with full attention between, experts in every layer."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, LinearAttention, ModelSpec


def build(c: Config) -> ModelSpec:
    heads, _, head_dim = p.head_counts(c)
    old = c.integers("attn_type_list")
    kinds = p.layer_types(
        c,
        p.num_layers(c),
        lambda i: (p.FULL if old[i] else p.LINEAR) if old else p.LINEAR if i % 2 else p.FULL,
        (p.FULL, p.LINEAR),
    )
    full = p.attention(c, window=p.window(c), theta=1e6)
    linear = LinearAttention(heads, heads, head_dim, head_dim, conv_kernel=0, flavour="lightning")
    experts = p.moe(c, intermediate=c.integer("intermediate_size"))
    return p.model(
        c,
        [Layer(full if kind == p.FULL else linear, experts) for kind in kinds],
        tied=False,
        norm_eps=c.number("rms_norm_eps", default=1e-5),
    )
