"""The language model of Qwen3.5 MoE."""

from headrace.spec.families.qwen3_5_moe import build

__all__ = ["build"]
