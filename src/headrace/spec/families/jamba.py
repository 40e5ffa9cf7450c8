"""Jamba: Mamba layers with an attention layer per period and experts on every other layer."""

from headrace.base.units import ceil_div
from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec, StateSpace


def build(c: Config) -> ModelSpec:
    hidden = p.hidden_size(c)
    automatic = c.get("mamba_dt_rank") in (None, "auto")
    state_space = StateSpace(
        1,
        c.integer("mamba_expand", default=2) * hidden,
        c.integer("mamba_d_state", default=16),
        c.integer("mamba_d_conv", default=4),
        dt_rank=ceil_div(hidden, 16) if automatic else c.integer("mamba_dt_rank"),
        conv_bias=c.flag("mamba_conv_bias", default=True),
        proj_bias=c.flag("mamba_proj_bias", default=False),
        gated_norm=False,
        inner_norms=True,
    )
    attention = p.attention(c, rotary=False)
    attention_every, attention_at = (
        c.integer("attn_layer_period", default=8),
        c.integer("attn_layer_offset", default=4, minimum=0),
    )
    experts_every, experts_at = (
        c.integer("expert_layer_period", default=2),
        c.integer("expert_layer_offset", default=1, minimum=0),
    )
    sparse = c.integer("num_experts", default=16) > 1
    experts = p.moe(c, intermediate=c.integer("intermediate_size"), normalize_top_k=False) if sparse else None
    layers = [
        Layer(
            attention if i % attention_every == attention_at else state_space,
            experts if experts is not None and i % experts_every == experts_at else p.mlp(c),
        )
        for i in range(p.num_layers(c))
    ]
    return p.model(c, layers, tied=False)
