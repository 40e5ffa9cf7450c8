"""The bytes predicted by `spec.accounting` are the bytes that the native backend allocates."""

from __future__ import annotations

import pytest
from test_models_logits import CASES, tiny_model

from headrace.engine.executors.native import BACKEND
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate


def items(folder, weights):
    return BACKEND.load(locate(str(folder)), EngineConfig(model=str(folder), weights=weights, threads=1)).memory()


@pytest.mark.parametrize("name", CASES)
def test_weights_take_what_was_predicted(tmp_path, name):
    _, folder = tiny_model(tmp_path, name)
    for weights in ("auto", "int8", "int4", "fp16"):
        for item in items(folder, weights):
            assert item.actual_bytes == item.predicted_bytes, (weights, item)


@pytest.mark.parametrize("width", [72, 107])
def test_biases_that_are_joined_take_what_they_took_apart(tmp_path, width):
    """Gate and up have one bias between them, of a width that fills no whole lines."""
    _, folder = tiny_model(tmp_path, "llama-tied-biased", intermediate_size=width)
    for item in items(folder, "auto"):
        assert item.actual_bytes == item.predicted_bytes, item
