"""SmolLM3: Llama's block; every fourth layer has no position embedding (and may slide)."""

from headrace.base.errors import InvalidInput
from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    count = p.num_layers(c)
    step = c.integer("no_rope_layer_interval", default=4)
    rotary = c.integers("no_rope_layers") or [int((i + 1) % step != 0) for i in range(count)]
    if len(rotary) < count:
        raise InvalidInput(f"no_rope_layers has {len(rotary)} entries for {count} layers", field="no_rope_layers")
    size = p.window(c) if c.flag("use_sliding_window", default=False) else None
    kinds = p.layer_types(c, count, lambda i: p.SLIDING if size and not rotary[i] else p.FULL, (p.FULL, p.SLIDING))
    bias = c.flag("attention_bias", default=False)
    layers = [
        Layer(
            p.attention(
                c,
                window=size if kind == p.SLIDING else None,
                qkv_bias=bias,
                out_bias=bias,
                rotary=bool(has_rope),
                theta=2e6,
            ),
            p.mlp(c, bias=c.flag("mlp_bias", default=False)),
        )
        for kind, has_rope in zip(kinds, rotary, strict=False)
    ]
    return p.model(c, layers, tied=True)
