"""Gemma 3n (text): per-layer embeddings, AltUp streams, LAuReL, and later layers that reuse earlier keys and values."""

from msgspec.structs import replace

from headrace.base.errors import InvalidInput
from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Attention, Layer, ModelSpec

_DEFAULTS = {
    "vocab_size": 262_400,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "num_kv_shared_layers": 15,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
    "final_logit_softcapping": 30.0,
}


def build(c: Config) -> ModelSpec:
    c = c.with_defaults(_DEFAULTS)
    count = p.num_layers(c)
    hidden = p.hidden_size(c)
    kinds = p.layer_types(c, count, p.every(5), (p.FULL, p.SLIDING))
    widths = c.integers("intermediate_size") or []
    widths = widths * count if len(widths) == 1 else widths
    if len(widths) != count:
        raise InvalidInput(f"intermediate_size has {len(widths)} entries for {count} layers", field="intermediate_size")
    first_shared = count - c.integer("num_kv_shared_layers", minimum=0)
    act = p.activation(c, "hidden_activation", default="gelu_pytorch_tanh")
    layers = [
        # Beside Gemma's four norms: LAuReL's, AltUp's router's and the one after the per-layer input.
        Layer(_attention(c, kinds, i, first_shared), p.mlp(c, width=widths[i], act=act), num_norms=7)
        for i in range(count)
    ]
    return p.model(
        c,
        layers,
        tied=True,
        embedding_scale=hidden**0.5,
        logit_softcap=c.number("final_logit_softcapping"),
        extra_parameters=_extra(c, count, hidden),
    )


def _attention(c: Config, kinds: list[str], i: int, first_shared: int) -> Attention:
    local = kinds[i] == p.SLIDING
    source = None
    if i >= first_shared:
        source = next((j for j in reversed(range(first_shared)) if kinds[j] == kinds[i]), None)
        if source is None:
            raise InvalidInput(f"no earlier {kinds[i]} layer for layer {i} to share", field="num_kv_shared_layers")
    bias = c.flag("attention_bias", default=False)
    attention = p.attention(
        c,
        window=p.window(c, default=512) if local else None,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        scale=1.0,
        rotary=False,
    )
    rope = p.rope(
        c,
        attention.head_dim,
        layer_type=kinds[i],
        theta=1e4 if local else 1e6,
        scaled=not local,
        theta_keys=("rope_local_base_freq",) if local else ("rope_theta",),
    )
    return replace(attention, kv_source=source, rope=rope)


def _extra(c: Config, count: int, hidden: int) -> tuple[tuple[str, int], ...]:
    narrow, streams, rank = (
        c.integer("hidden_size_per_layer_input"),
        c.integer("altup_num_inputs"),
        c.integer("laurel_rank"),
    )
    return (
        ("per_layer_embeddings", c.integer("vocab_size_per_layer_input") * count * narrow),
        ("per_layer_projections", hidden * count * narrow + narrow + count * 2 * hidden * narrow),
        ("altup", 2 * (streams - 1) * hidden**2 + count * (hidden + streams**2 + streams**3 + hidden * streams)),
        ("laurel", count * 2 * hidden * rank),
    )
