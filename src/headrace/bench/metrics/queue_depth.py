"""Requests waiting and running inside the server, from its metrics page."""

from typing import Any

from headrace.bench.metrics import Metric
from headrace.bench.view import RunView


def queue_depth(view: RunView) -> dict[str, Any] | None:
    """Mean and peak of waiting, mean of running."""
    waiting = [s.waiting for s in view.samples if s.waiting is not None]
    running = [s.running for s in view.samples if s.running is not None]
    if not waiting and not running:
        return None
    found: dict[str, Any] = {"samples": max(len(waiting), len(running))}
    if waiting:
        found |= {"waiting_mean": sum(waiting) / len(waiting), "waiting_peak": max(waiting)}
    if running:
        found |= {"running_mean": sum(running) / len(running), "running_peak": max(running)}
    return found


METRIC = Metric("queue_depth", "requests in the server", "requests", "neither", queue_depth)
