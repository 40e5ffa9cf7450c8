"""Dollars per million output tokens at the measured throughput: ($/h ÷ tok/s) × 277.8."""

from headrace.bench.metrics import Metric
from headrace.bench.metrics.output_tokens_per_s import output_rate
from headrace.bench.stats import Interval
from headrace.bench.view import RunView


def usd_per_million(view: RunView) -> Interval | None:
    """None without a price. The interval is that of the throughput, turned round."""
    rate = output_rate(view)
    if view.price is None or rate is None or rate.low <= 0:
        return None
    usd = view.price.usd_per_hour / 3600 * 1e6
    return Interval(usd / rate.value, usd / rate.high, usd / rate.low)


METRIC = Metric("usd_per_million_output_tokens", "dollars per million output tokens", "$", "lower", usd_per_million)
