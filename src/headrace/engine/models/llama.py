"""Llama 1-3, SmolLM and everything that copied them."""

from headrace.engine.weights.names import GGUF, HF, Architecture

MODEL = Architecture(hf=HF, gguf=GGUF)
