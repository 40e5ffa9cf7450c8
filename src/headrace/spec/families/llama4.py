"""Llama 4 configs that are flat rather than wrapped in `text_config`."""

from headrace.spec.families.llama4_text import build

__all__ = ["build"]
