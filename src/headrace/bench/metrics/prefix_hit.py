"""Share of prompt tokens answered from the prefix cache, as the server says it."""

from typing import Any

from headrace.bench.metrics import Metric
from headrace.bench.view import RunView


def prefix_hit(view: RunView) -> dict[str, Any] | None:
    """From the server's counters where it has them, else from the cached tokens of each answer's usage.

    `declared_share` is what the workload shares by design (an upper bound for a cache that starts empty).
    """
    declared = sum(r.shared_tokens_declared for r in view.ok)
    prompt = sum(r.prompt_tokens or r.prompt_tokens_declared for r in view.ok)
    found: dict[str, Any] = {"declared_share": declared / prompt if prompt else None}
    counted = [s for s in view.samples if s.prefix_queries is not None and s.prefix_hits is not None]
    cached = [r.cached_tokens for r in view.ok if r.cached_tokens is not None]
    if len(counted) >= 2:
        queries = (counted[-1].prefix_queries or 0) - (counted[0].prefix_queries or 0)
        hits = (counted[-1].prefix_hits or 0) - (counted[0].prefix_hits or 0)
        if queries > 0:
            return found | {"share": hits / queries, "hit_tokens": hits, "source": "server counters"}
    if cached and prompt:
        return found | {"share": sum(cached) / prompt, "hit_tokens": sum(cached), "source": "usage"}
    return None


METRIC = Metric("prefix_hit", "share of prompt tokens from the prefix cache", "share", "neither", prefix_hit)
