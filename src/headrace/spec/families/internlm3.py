"""InternLM 3: Llama's block, biases under Llama's names."""

from headrace.spec.families.llama import build

__all__ = ["build"]
