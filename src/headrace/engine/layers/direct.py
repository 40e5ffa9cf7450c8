"""Small native calls for steps of few rows, in which one of torch's operators costs more than its arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def native_call(name: str) -> Callable[..., Any] | None:
    """A function of the native extension; None where that is not installed, or is older than this package."""
    try:
        import headrace_native
    except ImportError:
        return None
    return getattr(headrace_native, name, None)
