"""Prefixes that were computed before are taken from the cache."""

from headrace.bench.rungs import Rung

RUNG = Rung(3, "prefix cache", "prefixes computed before are not computed again", "headrace", ({"prefix_cache": "on"},))
