"""Time to first token, from the intended send time."""

from headrace.bench.metrics import Metric, per_request, request_ttft_s

METRIC = Metric("ttft_s", "time to first token", "s", "lower", lambda view: per_request(view, request_ttft_s))
