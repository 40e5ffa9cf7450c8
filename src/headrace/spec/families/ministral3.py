"""Ministral 3: Mistral's block with YaRN."""

from headrace.spec.families.mistral import build

__all__ = ["build"]
