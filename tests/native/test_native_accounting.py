"""The bytes predicted by `spec.accounting` are the bytes that the native backend allocates."""

from __future__ import annotations

import itertools

import pytest
import torch
from quantized_checkpoints import quantize_folder
from safetensors.torch import load_file, save_file
from test_models_gguf import convert
from test_models_logits import CASES, tiny_model

from headrace.engine.executors.native import BACKEND
from headrace.spec.accounting import native_weight_bytes
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


def recast(folder) -> set[str]:
    """Give plain matrices and vectors of the checkpoint types in turn, whatever `config.json` says; the types it then has."""
    tensors = load_file(folder / "model.safetensors")
    kinds = itertools.cycle((torch.bfloat16, torch.float32, torch.float16, torch.float32))
    for name, tensor in tensors.items():
        if name.endswith((".weight", ".bias")) and tensor.is_floating_point():
            tensors[name] = tensor.to(next(kinds)).contiguous()
    save_file(tensors, folder / "model.safetensors")
    return {str(t.dtype) for t in tensors.values()}


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "gemma3", "phi3", "mixtral", "qwen3_moe"])
def test_prediction_follows_the_types_in_the_files_and_not_the_config(tmp_path, name):
    _, folder = tiny_model(tmp_path, name)
    before = items(folder, "auto")[0].actual_bytes
    assert len(recast(folder)) > 2
    for weights in ("auto", "int8", "int4", "fp16"):
        for item in items(folder, weights):
            assert item.actual_bytes == item.predicted_bytes, (weights, item)
    assert items(folder, "auto")[0].actual_bytes < before
    spec = locate(str(folder)).spec()
    assert native_weight_bytes(spec) != native_weight_bytes(spec, stored=locate(str(folder)).safetensors())


@pytest.mark.parametrize("skip", [(), ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.gate_proj")])
def test_plain_matrices_of_a_quantized_checkpoint_count_in_their_own_type(tmp_path, skip):
    _, folder = tiny_model(tmp_path, "llama", hidden_size=64, intermediate_size=128)
    change = {"ignore": ["lm_head", *skip]}
    quantize_folder(folder, "ct-int4", skip=skip, config=change)
    recast(folder)
    for item in items(folder, "auto"):
        assert item.actual_bytes == item.predicted_bytes, item


def test_projections_stored_as_one_in_a_gguf_file_count_as_they_are_split(tmp_path):
    """Widths that are no multiple of 16 pad each projection to whole tiles, which one matrix of all would not."""
    model, folder = tiny_model(tmp_path, "phi3", intermediate_size=72)
    target = tmp_path / "phi3.gguf"
    convert(folder, target, "phi3", model.config)
    for item in items(target, "auto"):
        assert item.actual_bytes == item.predicted_bytes, item
