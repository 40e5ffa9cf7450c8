"""Headrace: plan, serve and measure LLM inference. The public names below are imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.control.params import SamplingParams
    from headrace.llm import LLM, Completion

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "SamplingParams", "__version__"]

_HOME = {"LLM": "headrace.llm", "SamplingParams": "headrace.control.params", "Completion": "headrace.llm"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
