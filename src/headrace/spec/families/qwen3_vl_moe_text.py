"""The language model of Qwen3-VL MoE: Qwen3 MoE."""

from headrace.spec.families.qwen3_moe import build

__all__ = ["build"]
