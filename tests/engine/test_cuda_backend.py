"""Whom the CUDA backend serves, and what a step and a start may not do; nothing here needs a GPU."""

from __future__ import annotations

from pathlib import Path

import kernel_device  # noqa: F401 - chooses between the GPU and the interpreter before kernels are imported
import pytest
import torch
from test_cuda_steps import engine
from test_models_logits import tiny_model

import headrace.engine
from headrace.base.errors import UnsupportedModel
from headrace.engine.executors.cuda import BACKEND
from headrace.engine.launch import choose_backend
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate


@pytest.fixture
def card(monkeypatch):
    """Makes torch see one card of a compute capability."""

    def seen(name: str, capability: tuple[int, int]) -> None:
        exists = Path.exists
        monkeypatch.setattr(Path, "exists", lambda self: self.name == "nvidiactl" or exists(self))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    return seen


def test_cards_older_than_ampere_are_refused(tmp_path, card):
    files = locate(str(tiny_model(tmp_path, "llama")[1]))
    card("Tesla T4", (7, 5))
    with pytest.raises(UnsupportedModel) as refused:
        choose_backend(EngineConfig(model=files.name, backend="cuda"), files)
    for part in ("Tesla T4", "compute capability 7.5", "8.0 (Ampere) or later", "backend torch or native"):
        assert part in str(refused.value)
    backend, notes = choose_backend(EngineConfig(model=files.name), files)
    assert backend is not BACKEND
    assert any("Tesla T4" in note for note in notes)


@pytest.mark.parametrize(("name", "capability"), [("NVIDIA A10G", (8, 6)), ("NVIDIA H200", (9, 0))])
def test_ampere_and_later_are_served(tmp_path, card, name, capability):
    files = locate(str(tiny_model(tmp_path, "llama")[1]))
    card(name, capability)
    assert BACKEND.unavailable(files, EngineConfig(model=files.name, backend="cuda")) is None
    assert "no cuda:1" in BACKEND.unavailable(files, EngineConfig(model=files.name, backend="cuda", device="cuda:1"))


def test_a_step_sends_its_integers_with_one_copy(tmp_path, monkeypatch):
    runs = engine(tiny_model(tmp_path, "llama", num_hidden_layers=1)[1])
    metadata = runs.executor.runner.metadata
    sent, real = [], metadata.send
    monkeypatch.setattr(metadata, "send", lambda arrays: sent.append(sorted(arrays)) or real(arrays))
    greedy, drawn = runs.add([5, 6, 7, 8, 9]), runs.add([4, 3], temperature=0.9, top_k=5, top_p=0.9, min_p=0.01, seed=1)
    for work in ([(greedy, 3)], [(greedy, 2), (drawn, 2)], [(greedy, 1), (drawn, 1)]):
        sent.clear()
        runs.step(work)
        assert len(sent) == 1
        assert {"ids", "positions", "slots"} < set(sent[0])
    assert {"drawn", "params"} < set(sent[0])
    runs.close()


def test_nothing_is_tuned_but_on_demand():
    """What a start loads neither tunes by itself nor reads what does."""
    root = Path(headrace.engine.__file__).parent
    tuners = {root / "tune.py", root / "cuda" / "library_tune.py"}
    sources = [p for p in root.rglob("*.py") if p not in tuners]
    assert len(sources) > 100
    for path in sources:
        text = path.read_text()
        assert "autotune" not in text, path
        assert "engine.tune" not in text, path
        assert "library_tune" not in text, path
