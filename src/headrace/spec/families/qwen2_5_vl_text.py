"""The language model of Qwen2.5-VL: Qwen2."""

from headrace.spec.families.qwen2 import build

__all__ = ["build"]
