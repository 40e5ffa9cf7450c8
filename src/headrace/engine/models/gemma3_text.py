"""Gemma 3 (text): Gemma 2's four norms and a norm on each query and key head."""

from msgspec.structs import replace

from headrace.engine.models.gemma2 import MODEL as GEMMA2
from headrace.engine.weights.names import HF_HEAD_NORMS, Architecture

MODEL = Architecture(hf=replace(GEMMA2.hf, q_norm=HF_HEAD_NORMS.q_norm, k_norm=HF_HEAD_NORMS.k_norm), gguf=GEMMA2.gguf)
