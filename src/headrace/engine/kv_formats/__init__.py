"""How keys and values lie in the torch backend's pool. A file is a format, named as in `headrace.spec.precision`, and exports
`FORMAT`, the class of its pools; the plain types, which are stored as they are, share one."""

from __future__ import annotations

import torch

from headrace.base.registry import Registry
from headrace.engine.backend import Limits
from headrace.engine.kv_formats._contract import Pool
from headrace.engine.kv_formats._plain import PLAIN, PlainPool
from headrace.spec.cache import CacheLayout

__all__ = ["FORMATS", "PLAIN", "Pool", "names", "pool_class"]

FORMATS = Registry(__name__, "FORMAT", kind="KV format")


def names() -> tuple[str, ...]:
    """Every KV format that this backend computes with."""
    return (*PLAIN, *FORMATS.names())


def pool_class(name: str) -> type[Pool]:
    """The class of pools of the format `name`."""
    return PlainPool if name in PLAIN else FORMATS.get(name)


def make_pool(layout: CacheLayout, limits: Limits, dtype: torch.dtype, device: torch.device, num_layers: int) -> Pool:
    """Allocate the pool that `layout` describes; `dtype` is what keys and values are computed in."""
    return pool_class(layout.kv_precision)(layout, limits, dtype, device, num_layers)
