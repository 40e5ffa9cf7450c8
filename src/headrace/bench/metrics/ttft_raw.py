"""Time to first token from the moment the request really left: what most tools report."""

from headrace.bench.metrics import Metric, per_request

METRIC = Metric(
    "ttft_raw_s",
    "time to first token from the real send",
    "s",
    "lower",
    lambda view: per_request(view, lambda record: record.event_s[0] - record.sent_s),
)
