"""Time per output token after the first event, one figure per request."""

from headrace.bench.metrics import Metric, per_request, request_tpot_s

METRIC = Metric("tpot_s", "time per output token", "s", "lower", lambda view: per_request(view, request_tpot_s))
