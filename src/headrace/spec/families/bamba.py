"""Bamba: Mamba-2 layers with attention at `attn_layer_indices`, an MLP in every layer."""

from headrace.base.errors import InvalidInput
from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec, StateSpace


def build(c: Config) -> ModelSpec:
    attention_at = set(c.integers("attn_layer_indices") or ())
    bias = c.flag("attention_bias", default=False)
    attention = p.attention(c, qkv_bias=bias, out_bias=bias, partial=0.5)
    feed_forward = p.mlp(c, bias=c.flag("mlp_bias", default=False))
    state_space = mamba2(c)
    layers = [Layer(attention if i in attention_at else state_space, feed_forward) for i in range(p.num_layers(c))]
    return p.model(c, layers, tied=False, norm_eps=c.number("rms_norm_eps", default=1e-5))


def mamba2(c: Config, *, inner: int | None = None, gated_norm: bool = True) -> StateSpace:
    """Mamba-2 from the `mamba_*` keys that Bamba, Granite 4 and Falcon-H1 share."""
    if inner is None:
        inner = c.integer("mamba_expand", default=2) * p.hidden_size(c)
    heads = c.integer("mamba_n_heads", default=128)
    head_dim = inner // heads if c.get("mamba_d_head") in (None, "auto") else c.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise InvalidInput(f"mamba_n_heads {heads} x mamba_d_head {head_dim} is not {inner}", field="mamba_d_head")
    return StateSpace(
        2,
        inner,
        c.integer("mamba_d_state", default=256),
        c.integer("mamba_d_conv", default=4),
        num_heads=heads,
        head_dim=head_dim,
        groups=c.integer("mamba_n_groups", default=1),
        conv_bias=c.flag("mamba_conv_bias", default=True),
        proj_bias=c.flag("mamba_proj_bias", default=False),
        gated_norm=gated_norm,
    )
