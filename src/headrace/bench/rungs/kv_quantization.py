"""A smaller KV cache: half the bytes or less per token."""

from headrace.bench.rungs import Rung

RUNG = Rung(
    4,
    "KV quantization",
    "keys and values in 8 bits",
    "headrace",
    ({"kv_precision": "int8"}, {"kv_precision": "fp8"}),
)
