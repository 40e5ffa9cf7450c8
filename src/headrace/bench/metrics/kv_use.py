"""Share of the KV cache in use, from the server's metrics page."""

from typing import Any

from headrace.bench.metrics import Metric
from headrace.bench.view import RunView


def kv_use(view: RunView) -> dict[str, Any] | None:
    """Mean over the samples of the run, and the peak."""
    seen = [s.kv_usage for s in view.samples if s.kv_usage is not None]
    return {"mean": sum(seen) / len(seen), "peak": max(seen), "samples": len(seen)} if seen else None


METRIC = Metric("kv_use", "share of the KV cache in use", "share", "neither", kv_use)
