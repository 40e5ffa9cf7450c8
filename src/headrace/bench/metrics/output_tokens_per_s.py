"""Output tokens per second of complete answers, over the whole run."""

import numpy as np

from headrace.bench.metrics import Metric
from headrace.bench.stats import Interval, rate_interval
from headrace.bench.view import RunView


def output_rate(view: RunView) -> Interval | None:
    """Tokens at the times they arrived; a server's count that differs from the events' is spread over them."""
    ok = view.ok
    if not ok:
        return None
    at_s = np.concatenate([np.array(r.event_s) for r in ok])
    tokens = np.concatenate([np.array(r.event_tokens) * (r.tokens_out / max(sum(r.event_tokens), 1e-9)) for r in ok])
    start_s, end_s = view.span_s
    return rate_interval(at_s, tokens, start_s, end_s)


METRIC = Metric("output_tokens_per_s", "output tokens per second", "tok/s", "higher", output_rate)
