"""Kimi Linear: three Kimi-delta layers to one MLA layer without rope, DeepSeek-V3's router."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.families.deepseek_v3 import latent_attention, routed_experts
from headrace.spec.model import Layer, LinearAttention, ModelSpec


def build(c: Config) -> ModelSpec:
    count = p.num_layers(c)
    inner = Config(c.table("linear_attn_config") or {})
    heads = inner.integer("num_heads", default=None) or c.integer("linear_num_heads")
    dim = inner.integer("head_dim", default=None) or c.integer("linear_head_dim")
    kernel = inner.integer("short_conv_kernel_size", default=None) or c.integer("linear_conv_kernel_dim", default=4)
    full = inner.integers("full_attn_layers")
    kinds = p.layer_types(
        c,
        count,
        lambda i: p.FULL if (i + 1 in full if full is not None else i and i % 4 == 0) else p.LINEAR,
        (p.FULL, p.LINEAR),
    )
    delta = LinearAttention(heads, heads, dim, dim, kernel, flavour="kimi_delta")
    latent = latent_attention(c, rotary=False)
    experts = routed_experts(c)
    given = c.texts("mlp_layer_types")
    dense_first = c.integer("first_k_dense_replace", default=1, minimum=0)
    layers = [
        Layer(
            latent if kind == p.FULL else delta,
            experts if (given[i] == "sparse" if given else i >= dense_first) else p.mlp(c),
        )
        for i, kind in enumerate(kinds)
    ]
    return p.model(c, layers, tied=False, max_context=c.integer("model_max_length", "max_position_embeddings"))
