"""Nemotron-H and Nemotron 3: one part per layer – Mamba-2, attention, MLP or experts – under one norm."""

from headrace.base.errors import InvalidInput, UnsupportedModel
from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec, NoMixer, NoMLP, StateSpace

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NAMES = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


def build(c: Config) -> ModelSpec:
    if c.get("moe_latent_size") is not None:
        raise UnsupportedModel("experts in a latent space are not supported", field="moe_latent_size")
    heads, head_dim = c.integer("mamba_num_heads"), c.integer("mamba_head_dim")
    mixer = StateSpace(
        2,
        heads * head_dim,
        c.integer("ssm_state_size"),
        c.integer("conv_kernel", "mamba_d_conv", default=4),
        num_heads=heads,
        head_dim=head_dim,
        groups=c.integer("n_groups", "mamba_n_groups", default=8),
        conv_bias=c.flag("use_conv_bias", "mamba_conv_bias", default=True),
        proj_bias=c.flag("mamba_proj_bias", default=False),
    )
    bias = c.flag("attention_bias", default=False)
    act = p.activation(c, "mlp_hidden_act", default="relu2")
    parts = {
        "mamba": lambda: Layer(mixer, NoMLP(), num_norms=1),
        "attention": lambda: Layer(p.attention(c, qkv_bias=bias, out_bias=bias, rotary=False), NoMLP(), num_norms=1),
        "mlp": lambda: Layer(
            NoMixer(), p.mlp(c, gated=False, bias=c.flag("mlp_bias", default=False), act=act), num_norms=1
        ),
        "moe": lambda: Layer(
            NoMixer(),
            p.moe(
                c,
                gated=False,
                activation=act,
                bias=c.flag("mlp_bias", default=False),
                shared_intermediate=c.integer("moe_shared_expert_intermediate_size", default=0, minimum=0)
                * c.integer("n_shared_experts", default=1, minimum=0),
                router_correction=True,
                scoring="sigmoid",
                normalize_top_k=c.flag("norm_topk_prob", default=True),
                num_groups=c.integer("n_group", default=1),
                top_k_groups=c.integer("topk_group", default=1),
                routed_scale=c.number("routed_scaling_factor", default=1.0),
            ),
            num_norms=1,
        ),
    }
    return p.model(
        c,
        [parts[kind]() for kind in _kinds(c)],
        tied=False,
        norm_eps=c.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5),
    )


def _kinds(c: Config) -> list[str]:
    named = c.texts("layers_block_type", "layer_types")
    pattern = [] if named is not None else list(c.text("hybrid_override_pattern"))
    table = _NAMES if named is not None else _PATTERN
    field = "layers_block_type" if named is not None else "hybrid_override_pattern"
    kinds = named if named is not None else pattern
    for kind in kinds:
        if kind not in table:
            raise InvalidInput(f"{field}: unknown layer {kind!r}", field=field)
    count = c.integer("num_hidden_layers", default=len(kinds))
    if count != len(kinds):
        raise InvalidInput(f"{field} has {len(kinds)} entries for {count} layers", field=field)
    return [table[kind] for kind in kinds]
