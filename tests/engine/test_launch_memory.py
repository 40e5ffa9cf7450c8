"""What a start prints of memory: predicted and real bytes side by side."""

from __future__ import annotations

import logging

from test_models_logits import tiny_model

from headrace.engine.launch import launch
from headrace.spec.config import EngineConfig


def test_predicted_and_real_bytes_are_logged_side_by_side(tmp_path, caplog):
    _, folder = tiny_model(tmp_path, "llama")
    with caplog.at_level(logging.INFO, logger="headrace"):
        core = launch(EngineConfig(model=str(folder), backend="torch", device="cpu", num_blocks=20, max_model_len=64))
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("memory, ")]
    assert len(told) == len(core.info.memory) >= 2
    for line, item in zip(told, core.info.memory, strict=True):
        assert line.startswith(
            f"memory, {item.name}: {item.predicted_bytes:,} bytes predicted, {item.actual_bytes:,} held"
        )
        assert ("equal" in line) == (item.predicted_bytes == item.actual_bytes)
