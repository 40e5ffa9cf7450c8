"""The model catalog: exact geometries, checked against official parameter counts."""

import pytest

from headrace.base.errors import InvalidInput
from headrace.plan.deployment import find_model
from headrace.spec import models
from headrace.spec.accounting import parameters

CATALOG = models.catalog()


def test_at_least_thirty_geometries():
    assert len(CATALOG) >= 30


@pytest.mark.parametrize("model_id", sorted(CATALOG))
def test_parameters_are_the_official_count(model_id):
    entry = CATALOG[model_id]
    total = parameters(find_model(model_id).spec).total + entry.outside_text
    if entry.exact:
        assert total == entry.parameters
    else:
        # A rounded figure is right to about two percent; vision parts may or may not be in it.
        assert abs(total - entry.parameters) <= 0.023 * entry.parameters


@pytest.mark.parametrize("model_id", sorted(m.id for m in CATALOG.values() if m.active_parameters))
def test_active_parameters(model_id):
    entry = CATALOG[model_id]
    active = parameters(find_model(model_id).spec).active
    assert abs(active - entry.active_parameters) <= 0.2 * entry.active_parameters


@pytest.mark.parametrize("entry", CATALOG.values(), ids=lambda m: m.id)
def test_every_entry_names_its_sources(entry):
    assert entry.parameters_source
    assert entry.config_source
    assert entry.family
    assert entry.config["model_type"]


def test_names_do_not_collide():
    owner = {}
    for entry in CATALOG.values():
        for name in models.spellings(entry):
            assert owner.setdefault(models.fold(name), entry.id) == entry.id, name


@pytest.mark.parametrize(
    ("name", "model_id"),
    [
        ("mistral-7b", "mistral-7b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.3-70b"),
        ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-r1"),
        ("someone/Qwen3-32B-AWQ", "qwen3-32b"),
        ("zhipuai/GLM-5", "glm-5"),
        ("nvidia/DeepSeek-R1-0528-FP4-v2", "deepseek-r1"),
        ("Qwen/Qwen3-32B-FP8-Static-PerTensor_hf_quant", "qwen3-32b"),
        ("amd/Llama-3.1-70B-Instruct-FP8-KV", "llama-3.1-70b"),
        ("unsloth/Llama-3.3-70B-Instruct-bnb-4bit", "llama-3.3-70b"),
        ("Llama-3_1-8B-Instruct", "llama-3.1-8b"),
        ("Llama-3.1-8B (FP8)", "llama-3.1-8b"),
        ("qwen3_235b_a22b", "qwen3-235b-a22b"),
        ("meta-llama/Llama-3.3-70B-Instruct@main", "llama-3.3-70b"),
        ("Qwen/Qwen3-8B@9c925d64d72725edaf899c6cb9c377fd0709d9c5", "qwen3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct:latest", "llama-3.1-8b"),
        ("https://huggingface.co/Qwen/Qwen3-8B", "qwen3-8b"),
        ("hf://Qwen/Qwen3-8B/", "qwen3-8b"),
        ("unsloth/Llama-3.2-3B-Instruct-unsloth-bnb-4bit", "llama-3.2-3b"),
        ("amd/gpt-oss-120b-w-mxfp4-a-fp8", "gpt-oss-120b"),
        ("google/gemma-3-12b-it-qat-q4_0-gguf", "gemma-3-12b"),
        ("bartowski/Llama-3.1-8B-Instruct-Q4_K_M-GGUF", "llama-3.1-8b"),
        ("ISTA-DASLab/gemma-3-27b-it-GPTQ-4b-128g", "gemma-3-27b"),
        ("Llama-v3.3-70B", "llama-3.3-70b"),
        ("llama_3_1_8b_instruct", "llama-3.1-8b"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama-3.1-8b"),
        ("Qwen/Qwen3-VL-235B-A22B-Instruct-FP8", "qwen3-vl-235b-a22b"),
    ],
)
def test_short_names_and_hub_ids(name, model_id):
    assert models.find(name).id == model_id


def test_unknown_model_suggests():
    with pytest.raises(InvalidInput, match=r"llama-3\.1-8b"):
        models.find("llama-3.1-9b")


def test_the_sliding_window_of_mistral_is_in_v01_only():
    first, second = find_model("mistral-7b-v0.1").spec, find_model("mistral-7b").spec
    assert first.layers[0].mixer.window == 4096
    assert second.layers[0].mixer.window is None
