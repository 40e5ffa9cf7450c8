"""Mistral 7B and its successors; GGUF files call them llama."""

from headrace.engine.weights.names import GGUF, HF, Architecture

MODEL = Architecture(hf=HF, gguf=GGUF)
