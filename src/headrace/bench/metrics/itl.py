"""Inter-token latency: per token, whatever the chunks."""

from headrace.bench.metrics import Metric, per_token, request_itl_s

METRIC = Metric("itl_s", "inter-token latency", "s", "lower", lambda view: per_token(view, request_itl_s))
