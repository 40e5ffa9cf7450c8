"""The gap between chunks: what a reader sees when several tokens come at once."""

import numpy as np

from headrace.bench.metrics import Metric, per_token

METRIC = Metric(
    "chunk_gap_s",
    "gap between chunks",
    "s",
    "lower",
    lambda view: per_token(view, lambda record: np.diff(np.array(record.event_s))),
)
