"""Energy of the GPUs during the run, where NVML can tell."""

from typing import Any

from headrace.bench.metrics import Metric
from headrace.bench.view import RunView


def energy(view: RunView) -> dict[str, Any] | None:
    """Joules of all GPUs of this host between the first and the last sample, and per output token."""
    seen = [s.energy_j for s in view.samples if s.energy_j is not None]
    tokens = sum(r.tokens_out for r in view.ok)
    if len(seen) < 2 or not tokens:
        return None
    joules = seen[-1] - seen[0]
    return {"joules": joules, "joules_per_output_token": joules / tokens, "source": "NVML"}


METRIC = Metric("energy", "energy of the GPUs", "J", "lower", energy)
