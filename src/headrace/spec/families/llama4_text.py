"""Llama 4 (text): chunked rope layers with full NoPE layers between, top-1 experts beside a shared one."""

from headrace.base.errors import InvalidInput
from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec

_DEFAULTS = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-5,
}


def build(c: Config) -> ModelSpec:
    c = c.with_defaults(_DEFAULTS)
    count = p.num_layers(c)
    step = c.integer("no_rope_layer_interval", default=4)
    rotary = c.integers("no_rope_layers") or [int((i + 1) % step != 0) for i in range(count)]
    if len(rotary) < count:
        raise InvalidInput(f"no_rope_layers has {len(rotary)} entries for {count} layers", field="no_rope_layers")
    chunk = c.integer("attention_chunk_size", default=8192)
    kinds = p.layer_types(c, count, lambda i: p.CHUNKED if rotary[i] else p.FULL, (p.FULL, p.CHUNKED))
    every = c.integer("interleave_moe_layer_step", default=1)
    listed = c.integers("moe_layers")
    sparse = set(range(every - 1, count, every) if listed is None else listed)
    bias = c.flag("attention_bias", default=False)
    width = c.integer("intermediate_size")
    experts = p.moe(c, intermediate=width, shared_intermediate=width, scoring="sigmoid", normalize_top_k=False)
    layers = [
        Layer(
            p.attention(
                c,
                window=chunk if kinds[i] == p.CHUNKED else None,
                chunked=kinds[i] == p.CHUNKED,
                qkv_bias=bias,
                out_bias=bias,
                rotary=bool(rotary[i]),
                theta=5e5,
                interleaved=True,
            ),
            experts if i in sparse else p.mlp(c, width=c.integer("intermediate_size_mlp")),
        )
        for i in range(count)
    ]
    return p.model(c, layers, tied=False)
