"""Gemma 3n configs that are flat rather than wrapped in `text_config`."""

from headrace.spec.families.gemma3n_text import build

__all__ = ["build"]
