"""Complete answers per second."""

import numpy as np

from headrace.bench.metrics import Metric
from headrace.bench.stats import Interval, rate_interval
from headrace.bench.view import RunView


def request_rate(view: RunView) -> Interval | None:
    """Counted at the end of each answer."""
    ok = view.ok
    if not ok:
        return None
    start_s, end_s = view.span_s
    return rate_interval(np.array([r.end_s for r in ok]), np.ones(len(ok)), start_s, end_s)


METRIC = Metric("requests_per_s", "requests per second", "1/s", "higher", request_rate)
