"""Qwen2-VL configs of the older, flat form: Qwen2's keys beside `vision_config`."""

from headrace.spec.families.qwen2 import build

__all__ = ["build"]
