"""Requests per second that keep the service level objective, each judged on its own times. Failures are not good."""

import numpy as np

from headrace.bench.metrics import Metric
from headrace.bench.stats import Interval, rate_interval
from headrace.bench.view import RunView


def goodput(view: RunView) -> Interval | None:
    """None without an objective."""
    if view.slo is None:
        return None
    slo = view.slo
    good = [record.end_s for record in view.ok if slo.kept_by(record)]
    start_s, end_s = view.span_s
    return rate_interval(np.array(good), np.ones(len(good)), start_s, end_s)


METRIC = Metric("goodput_per_s", "requests per second within the objective", "1/s", "higher", goodput)
