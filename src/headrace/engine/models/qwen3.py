"""Qwen3 dense: a norm on each query and key head."""

from headrace.engine.weights.names import GGUF, HF_HEAD_NORMS, Architecture

MODEL = Architecture(hf=HF_HEAD_NORMS, gguf=GGUF)
