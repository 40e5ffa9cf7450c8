"""The engine with continuous batching and a paged cache, every other technique off."""

from headrace.bench.rungs import Rung

RUNG = Rung(
    2,
    "engine",
    "continuous batching, paged KV cache, chunked prefill",
    "headrace",
    ({"prefix_cache": "off"},),
    technique=False,
)
