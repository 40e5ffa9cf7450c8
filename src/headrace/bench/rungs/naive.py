"""One request after another with a KV cache: what a plain script does."""

from headrace.bench.rungs import Rung

RUNG = Rung(1, "naive", "serial loop, batch 1, KV cache", "naive", ({"kv_cache": "on"},), technique=False)
