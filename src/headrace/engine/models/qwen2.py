"""Qwen2 and Qwen2.5."""

from headrace.engine.weights.names import GGUF, HF, Architecture

MODEL = Architecture(hf=HF, gguf=GGUF)
