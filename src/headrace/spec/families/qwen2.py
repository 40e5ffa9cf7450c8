"""Qwen2 and Qwen2.5: biased Q/K/V; layers from `max_window_layers` on slide where `use_sliding_window` is set."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    windows = qwen_windows(c)
    return p.model(c, [Layer(p.attention(c, window=w, qkv_bias=True), p.mlp(c)) for w in windows], tied=False)


def qwen_windows(c: Config) -> list[int | None]:
    """The window of each layer: Qwen's `sliding_window` counts only with `use_sliding_window`."""
    count = p.num_layers(c)
    size = p.window(c) if c.flag("use_sliding_window", default=False) else None
    first = c.integer("max_window_layers", default=count, minimum=0)
    kinds = p.layer_types(c, count, lambda i: p.SLIDING if size and i >= first else p.FULL, (p.FULL, p.SLIDING))
    return [size if kind == p.SLIDING else None for kind in kinds]
