"""Falcon Mamba: Mamba with weightless norms on dt, B and C."""

from headrace.spec.families.mamba import build

__all__ = ["build"]
