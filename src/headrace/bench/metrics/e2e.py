"""End-to-end latency: from the intended send time to the last token."""

from headrace.bench.metrics import Metric, per_request, request_e2e_s

METRIC = Metric("e2e_s", "end-to-end latency", "s", "lower", lambda view: per_request(view, request_e2e_s))
