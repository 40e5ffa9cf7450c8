"""The language model of Qwen2-VL: Qwen2 with multimodal rope, which is plain rope for text."""

from headrace.spec.families.qwen2 import build

__all__ = ["build"]
