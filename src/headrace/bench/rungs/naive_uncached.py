"""One request after another, everything computed again for each token."""

from headrace.bench.rungs import Rung

RUNG = Rung(
    0,
    "naive without KV cache",
    "serial loop, batch 1, the whole sequence computed again for every token",
    "naive",
    ({"kv_cache": "off"},),
    technique=False,
    share=0.0625,
)
