"""FBGEMM's FP8 checkpoints: `weight` with one `weight_scale` per output."""

from headrace.engine.quant.readers.fp8 import FP8Reader

READER = FP8Reader
