"""Time to the first byte of the response's body, from the real send."""

from headrace.bench.metrics import Metric, per_request

METRIC = Metric(
    "first_byte_s",
    "time to first byte from the real send",
    "s",
    "lower",
    lambda view: per_request(view, lambda record: record.first_byte_s - record.sent_s if record.first_byte_s else None),
)
