"""Bytes of one rank's weights by part, as a deployment stores them."""

from __future__ import annotations

from functools import lru_cache

from headrace.spec import accounting
from headrace.spec.model import ModelSpec
from headrace.spec.sharding import Layout, rank_spec

Parts = tuple[tuple[str, int], ...]
"""Bytes by part, hashable."""


@lru_cache(maxsize=512)
def rank_parts(
    spec: ModelSpec, layout: Layout, weights: str, part_weights: tuple[tuple[str, str], ...], file_parts: Parts
) -> Parts:
    """`part_weights`: formats of parts that are stored otherwise; `file_parts`: bytes of a file that mixes types (GGUF), whose
    parts are divided over the ranks as their parameters are."""
    rank = rank_spec(spec, layout)
    by_part = dict(accounting.weight_bytes(rank, weights).by_part)
    for part, stored in part_weights:
        by_part[part] = accounting.weight_bytes(rank, stored).by_part[part]
    if file_parts:
        whole = accounting.weight_bytes(spec, weights).by_part
        by_part = {part: round(n * by_part[part] / whole[part]) if whole[part] else n for part, n in file_parts}
    return tuple(by_part.items())
