"""Prometheus metrics, under the names that dashboards for LLM servers know, with the prefix `headrace:`.

Gauges and prefix-cache counters come from the engine's latest snapshot when they are read; everything a client can
feel (times, tokens, outcomes) is observed here as it happens. All carry the label `model_name`.

| name | kind | meaning |
|---|---|---|
| num_requests_running | gauge | sequences in the engine's batch |
| num_requests_waiting | gauge | sequences queued in the engine |
| kv_cache_usage_perc | gauge | share of KV blocks held by live sequences, 0 to 1 |
| prefix_cache_queries_total, prefix_cache_hits_total | counter | prompt tokens looked up in and found in the prefix cache |
| num_preemptions_total | counter | sequences evicted from the batch to be computed again |
| prompt_tokens_total, generation_tokens_total | counter | tokens read and written, as they are |
| requests_refused_total{status, code} | counter | requests answered with an error, by status and the error's code |
| request_success_total{finished_reason} | counter | finished sequences: stop, length, abort or error |
| time_to_first_token_seconds | histogram | from arrival of the request to its first token |
| inter_token_latency_seconds | histogram | between tokens of one sequence |
| e2e_request_latency_seconds | histogram | from arrival to the last token |
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.control.api import EngineClient, FinishReason
from headrace.serve.errors import ApiError

PREFIX = "headrace:"
_FIRST_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
_BETWEEN_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 0.8, 1.5, 3.0, 10.0)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class _Snapshot(Collector):
    """The engine's latest stats as metrics, taken when they are scraped."""

    def __init__(self, engine: EngineClient, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        for name, value, text in (
            ("num_requests_running", stats.running, "Sequences in the engine's batch."),
            ("num_requests_waiting", stats.waiting, "Sequences queued in the engine."),
            ("kv_cache_usage_perc", stats.kv_usage, "Share of KV blocks held by live sequences, 0 to 1."),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, value, text in (
            ("prefix_cache_queries", stats.prefix_queries_tokens, "Prompt tokens looked up in the prefix cache."),
            ("prefix_cache_hits", stats.prefix_hit_tokens, "Prompt tokens found in the prefix cache."),
            ("num_preemptions", stats.preemptions, "Sequences evicted from the batch to be computed again."),
        ):
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter


class LoopCounter(Collector):
    """A counter for what happens with every token: it belongs to the event loop's thread and needs no lock."""

    def __init__(self, name: str, text: str, model: str) -> None:
        self._name, self._text, self._model = name, text, model
        self._created_s = time.time()
        self.value = 0

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=["model_name"])
        family.add_metric([self._model], self.value, created=self._created_s)
        yield family


class LoopHistogram(Collector):
    """A histogram for what happens with every token: it belongs to the event loop's thread and needs no lock."""

    def __init__(self, name: str, text: str, model: str, buckets: Sequence[float]) -> None:
        self._name, self._text, self._model = name, text, model
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._created_s = time.time()

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        below, total = [], 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            below.append(("+Inf" if bound == math.inf else repr(bound), float(total)))
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        family.add_metric([self._model], below, self._sum)
        family.add_sample(self._name + "_created", {"model_name": self._model}, self._created_s)
        yield family


class Metrics:
    """Everything `/metrics` shows, in a registry of its own, so that several servers can live in one process."""

    def __init__(self, engine: EngineClient, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Snapshot(engine, model))

        def counter(name: str, text: str) -> Counter:
            family = Counter(PREFIX + name, text, ["model_name"], registry=self.registry)
            return family.labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry)
            return family.labels(model)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of sequences that have their first token.")
        self.generation_tokens = LoopCounter(PREFIX + "generation_tokens", "Tokens generated.", model)
        self.registry.register(self.generation_tokens)
        self.first_token_s = histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_S)
        self.between_tokens_s = LoopHistogram(
            PREFIX + "inter_token_latency_seconds", "Between tokens of one sequence.", model, _BETWEEN_S
        )
        self.registry.register(self.between_tokens_s)
        self.whole_s = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE_S)
        finished = Counter(
            PREFIX + "request_success",
            "Finished sequences by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.finished = {reason: finished.labels(model, reason.value) for reason in FinishReason}

        self._refused = Counter(
            PREFIX + "requests_refused",
            "Requests answered with an error, by HTTP status and the error's code.",
            ["model_name", "status", "code"],
            registry=self.registry,
        )
        self._model = model

    def refused(self, error: ApiError) -> None:
        """Count a request whose answer is this error."""
        self._refused.labels(self._model, str(error.status), error.code or "").inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
