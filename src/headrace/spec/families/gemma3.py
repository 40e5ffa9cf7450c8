"""Gemma 3 configs that are flat rather than wrapped in `text_config`."""

from headrace.spec.families.gemma3_text import build

__all__ = ["build"]
