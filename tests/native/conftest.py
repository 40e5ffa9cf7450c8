"""These tests borrow scenarios and slow references from the torch executor's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

pytest.importorskip("headrace_native", reason="headrace-native is not installed (pip install ./native)")


@pytest.fixture
def native_engines(monkeypatch):
    """Let the scenarios' `Engine` use the native backend: blocks of 16 tokens, fp32 activations and fp32 KV."""
    import torch_steps

    from headrace.engine.executors.native import BACKEND

    monkeypatch.setattr(torch_steps, "BACKEND", BACKEND)
    monkeypatch.setitem(torch_steps.Engine.__init__.__kwdefaults__, "block_tokens", 16)
    defaults = torch_steps.Engine.of.__func__.__kwdefaults__
    monkeypatch.setitem(defaults, "options", (("activations", "fp32"),))
    monkeypatch.setitem(defaults, "kv", "fp32")
    return defaults
