"""The language model of Qwen3.5."""

from headrace.spec.families.qwen3_5 import build

__all__ = ["build"]
