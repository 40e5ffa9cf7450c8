"""How late the client sent: intended to sent. Large values mean that the client, not the server, was measured."""

from headrace.bench.metrics import Metric, per_request

METRIC = Metric(
    "send_lateness_s",
    "lateness of the client",
    "s",
    "lower",
    lambda view: per_request(view, lambda record: record.sent_s - record.intended_s),
)
