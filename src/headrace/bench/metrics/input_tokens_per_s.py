"""Prompt tokens per second, counted when a request's first token arrives."""

import numpy as np

from headrace.bench.metrics import Metric
from headrace.bench.stats import Interval, rate_interval
from headrace.bench.view import RunView


def input_rate(view: RunView) -> Interval | None:
    """The server's own prompt counts where it gives them, else the declared ones."""
    ok = view.ok
    if not ok:
        return None
    tokens = np.array([r.prompt_tokens if r.prompt_tokens is not None else r.prompt_tokens_declared for r in ok], float)
    start_s, end_s = view.span_s
    return rate_interval(np.array([r.event_s[0] for r in ok]), tokens, start_s, end_s)


METRIC = Metric("input_tokens_per_s", "prompt tokens per second", "tok/s", "higher", input_rate)
