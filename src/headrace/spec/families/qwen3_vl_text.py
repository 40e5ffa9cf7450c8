"""The language model of Qwen3-VL: Qwen3 dense."""

from headrace.spec.families.qwen3 import build

__all__ = ["build"]
