"""StableLM: LayerNorm, rope on a quarter of each head, optionally parallel."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    attention = p.attention(
        c,
        qkv_bias=c.flag("use_qkv_bias", default=False),
        qk_norm="full" if c.flag("qk_layernorm", default=False) else "none",
        partial=0.25,
    )
    parallel = c.flag("use_parallel_residual", default=False)
    layer = Layer(attention, p.mlp(c), num_norms=1 if parallel else 2)
    return p.model(c, [layer] * p.num_layers(c), tied=False, norm_kind="layer", norm_bias=True)
