"""Kimi K2: DeepSeek-V3's architecture under its own name."""

from headrace.spec.families.deepseek_v3 import build

__all__ = ["build"]
