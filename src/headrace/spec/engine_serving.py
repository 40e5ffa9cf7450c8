"""How each engine is started and what its metrics are called: the `[launch]` and `[metrics]` tables of its facts file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import msgspec

from headrace.base.errors import InvalidInput
from headrace.spec.engine_facts import engines, find


class LaunchFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a server of this engine is started on this host.

    `command`: the line, with `{model}`, `{port}`, `{python}` and `{temporary}` (a folder) to fill in. `flags`:
    setting → arguments, where `{value}` is the setting and `{context_of_all_slots}` is context × slots; settings that
    are switches have `NAME.on` and `NAME.off`. A setting without an entry is refused, never ignored. `health`: path
    that answers 200 once requests are taken. `flush`: METHOD PATH that empties the prefix cache, once for each slot
    where it names `{slot}`; "" where there is none, and `no_flush` says why, or what a flush leaves. `version`: a
    command that prints it. `settings`: METHOD PATH that shows resolved settings, where there is one. `source`: where
    this is written.
    """

    command: tuple[str, ...]
    flags: Mapping[str, tuple[str, ...]] = {}
    env: Mapping[str, str] = {}
    health: str = "/health"
    flush: str = ""
    no_flush: str = ""
    version: tuple[str, ...] = ()
    settings: str = ""
    ready_timeout_s: float = 600.0
    source: str = ""


class MetricNames(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names on the engine's metrics page; several names are alternatives by version, the first present one counts.

    running, waiting: requests · kv_usage: share from 0 to 1 · prefix_queries, prefix_hits: counters in tokens ·
    prefix_hit_rate: a gauge, for engines without the counters. An empty tuple: the engine does not say.
    """

    path: str = "/metrics"
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    kv_usage: tuple[str, ...] = ()
    prefix_queries: tuple[str, ...] = ()
    prefix_hits: tuple[str, ...] = ()
    prefix_hit_rate: tuple[str, ...] = ()
    source: str = ""

    def all(self) -> frozenset[str]:
        """Every name of this engine."""
        parts = (self.running, self.waiting, self.kv_usage, self.prefix_queries, self.prefix_hits, self.prefix_hit_rate)
        return frozenset(name for part in parts for name in part)


@cache
def launch_facts(engine: str) -> LaunchFacts:
    """Launch facts of an engine in any spelling of its name."""
    facts = find(engine)
    if "launch" not in facts.sections:
        raise InvalidInput(f"no launch line is known for {engine}", field="engine")
    return msgspec.convert(facts.sections["launch"], LaunchFacts)


@cache
def metric_names() -> Mapping[str, MetricNames]:
    """Metric names of every engine that has some, by engine id."""
    return {
        facts.id: msgspec.convert(facts.sections["metrics"], MetricNames)
        for facts in engines().values()
        if "metrics" in facts.sections
    }
