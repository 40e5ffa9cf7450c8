"""Spellings of `config.json`: old and new keys, nulls, wrappers, quantization; and what is refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_spec_kv import GEMMA3
from test_spec_parameters import CASES, SMALL, built_on_cpu, config_of
from test_spec_reference import GPT_OSS_120B, MISTRAL

from headrace.base.errors import HeadraceError, InvalidInput, UnsupportedModel
from headrace.spec.hf import FAMILIES, spec_from_hf
from headrace.spec.model import Attention, LatentAttention, ModelSpec, Rope

LLAMA: dict[str, Any] = {**SMALL, "model_type": "llama"}


def attention(spec: ModelSpec, layer: int = 0) -> Attention:
    mixer = spec.layers[layer].mixer
    assert isinstance(mixer, Attention)
    return mixer


def rope(spec: ModelSpec, layer: int = 0) -> Rope:
    found = attention(spec, layer).rope
    assert found is not None
    return found


@pytest.mark.parametrize("case", CASES)
def test_rope_and_windows_equal_those_of_transformers(case: str) -> None:
    """Dimension and base of every rotary embedding, and which layers slide."""
    model = built_on_cpu(case)
    spec = spec_from_hf(config_of(case))
    kinds = getattr(model.config, "layer_types", None)
    for i, layer in enumerate(spec.layers):
        if (
            isinstance(layer.mixer, Attention)
            and kinds is not None
            and kinds[i] in ("sliding_attention", "full_attention")
        ):
            window = getattr(model.config, "sliding_window", None)
            assert layer.mixer.window == (window if kinds[i] == "sliding_attention" else None)
    rotary = {n: m for n, m in model.named_modules() if n.endswith("rotary_emb")}
    for module in rotary.values():
        for name, buffer in module.named_buffers():
            if not name.endswith("inv_freq") or "original" in name:
                continue
            kind = name.removesuffix("inv_freq").strip("_")
            ropes = {
                layer.mixer.rope
                for i, layer in enumerate(spec.layers)
                if isinstance(layer.mixer, Attention | LatentAttention)
                and layer.mixer.rope is not None
                and (not kind or kinds is None or kinds[i] == kind)
            }
            for found in ropes:
                if found.scaling.kind == "none":
                    expected = found.theta ** (-np.arange(0, found.dim, 2) / found.dim)
                    if found.freq_factors:
                        expected = expected / np.array(found.freq_factors)
                    np.testing.assert_allclose(buffer.numpy(), expected, rtol=1e-5)


def test_every_family_file_is_covered_by_a_case() -> None:
    aliases = {"gemma3", "gemma3n", "llama4", "kimi_k2", "qwen3_5", "qwen3_5_moe", "qwen2_vl", "qwen2_5_vl"}
    vision = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}
    tested = {str(case["model_type"]) for case in CASES.values()}
    assert {name.replace("-", "_") for name in FAMILIES.names()} == tested | aliases | vision


@pytest.mark.parametrize(
    "wrapped", ["qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "kimi_k2"]
)
def test_aliases_equal_what_they_copy(wrapped: str) -> None:
    source = {
        "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe",
        "kimi_k2": "deepseek_v3",
    }[wrapped]  # fmt: skip
    config = config_of(source)
    assert spec_from_hf(config | {"model_type": wrapped}).layers == spec_from_hf(config).layers


def test_old_and_new_rope_spellings_agree() -> None:
    scaling = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    old = spec_from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}})
    older = spec_from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = spec_from_hf(LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    assert rope(old) == rope(older) == rope(new)
    assert rope(new).theta == 5e5
    assert rope(new).scaling.kind == "llama3"
    assert rope(new).scaling.original_max_context == 64


def test_gemma3_rope_per_layer_kind_in_both_spellings() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = spec_from_hf(GEMMA3 | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": linear})
    per_kind = {
        "full_attention": {"rope_theta": 1e6, **linear},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    new = spec_from_hf(GEMMA3 | {"rope_parameters": per_kind})
    assert old.layers == new.layers
    assert (rope(old, 0).theta, rope(old, 0).scaling.kind) == (1e4, "none")
    assert (rope(old, 5).theta, rope(old, 5).scaling.kind, rope(old, 5).scaling.factor) == (1e6, "linear", 8.0)


def test_gemma3_pattern_and_layer_types_agree() -> None:
    kinds = ["full_attention" if (i + 1) % 3 == 0 else "sliding_attention" for i in range(18)]
    by_pattern = spec_from_hf(GEMMA3 | {"sliding_window_pattern": 3})
    assert by_pattern.layers == spec_from_hf(GEMMA3 | {"layer_types": kinds}).layers
    assert [attention(by_pattern, i).window for i in range(3)] == [512, 512, None]


def test_a_wrapper_gives_its_language_model_and_sparse_text_config_its_defaults() -> None:
    wrapped = {
        "model_type": "gemma3", "eos_token_id": [1, 106], "vision_config": {"hidden_size": 1152},
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    }  # fmt: skip
    spec = spec_from_hf(wrapped)
    assert (spec.model_type, spec.vocab_size, spec.max_context) == ("gemma3_text", 262_208, 131_072)
    assert (attention(spec).num_heads, attention(spec).num_kv_heads, attention(spec).head_dim) == (8, 4, 256)
    assert spec.eos_token_ids == (1, 106)


def test_yarn_extends_the_context_and_linear_does_not() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert spec_from_hf(LLAMA | {"rope_scaling": yarn}).max_context == 1024
    assert spec_from_hf(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}).max_context == 256


def test_longrope_factors_and_its_old_name() -> None:
    config = {
        **SMALL, "model_type": "phi3", "max_position_embeddings": 1024, "original_max_position_embeddings": 256,
        "rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    }  # fmt: skip
    scaling = rope(spec_from_hf(config)).scaling
    assert (scaling.kind, scaling.factor, scaling.original_max_context) == ("longrope", 4.0, 256)
    assert (scaling.short_factors, scaling.long_factors) == ((1.0,) * 4, (2.0,) * 4)


def test_null_is_absent() -> None:
    nulls = {
        "head_dim": None,
        "sliding_window": None,
        "rope_scaling": None,
        "attention_bias": None,
        "layer_types": None,
    }
    assert spec_from_hf(LLAMA | nulls) == spec_from_hf(LLAMA)


def test_mistral_window_null_and_present() -> None:
    assert attention(spec_from_hf(MISTRAL)).window is None
    assert attention(spec_from_hf(MISTRAL | {"sliding_window": 4096})).window == 4096


def test_a_mistral_config_that_says_nothing_of_a_window_has_v01s() -> None:
    silent = {k: v for k, v in MISTRAL.items() if k != "sliding_window"}
    assert attention(spec_from_hf(silent)).window == 4096


def test_qwen2_window_needs_use_sliding_window_and_starts_at_max_window_layers() -> None:
    qwen = {**SMALL, "model_type": "qwen2", "sliding_window": 32, "max_window_layers": 3}
    assert [attention(spec_from_hf(qwen), i).window for i in range(4)] == [None] * 4
    used = spec_from_hf(qwen | {"use_sliding_window": True})
    assert [attention(used, i).window for i in range(4)] == [None, None, None, 32]


@pytest.mark.parametrize(
    ("quantization", "stored"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block128"),
        ({"quant_method": "fp8"}, "fp8_e4m3"),
        ({"quant_method": "fbgemm_fp8"}, "fp8_channel"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, "int4_g128"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False}, "int8_g32_asym"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "int4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, "int4_g64_asym"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4_single"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "nf4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {
                            "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True,
                        },
                    },
                },
                "ignore": ["lm_head"],
            },
            "int4_g128",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
            },
            "fp8_channel",
        ),
    ],
)  # fmt: skip
def test_quantization_config_names_the_stored_precision(quantization: dict[str, Any], stored: str) -> None:
    assert spec_from_hf(LLAMA | {"quantization_config": quantization}).checkpoint_precision == stored


def test_modules_not_converted_become_unquantized_parts() -> None:
    assert spec_from_hf(GPT_OSS_120B).unquantized_parts == ("attention", "embedding", "lm_head", "router")


@pytest.mark.parametrize(
    ("key", "value", "precision"),
    [
        ("torch_dtype", "float16", "fp16"),
        ("dtype", "bfloat16", "bf16"),
        ("torch_dtype", None, "bf16"),
        ("dtype", "float32", "fp32"),
    ],
)
def test_dtype_in_both_spellings(key: str, value: str | None, precision: str) -> None:
    assert spec_from_hf(LLAMA | {key: value}).checkpoint_precision == precision


def test_an_unknown_model_type_is_refused_by_name_even_with_llamas_keys() -> None:
    with pytest.raises(UnsupportedModel, match="brand_new_llm"):
        spec_from_hf(LLAMA | {"model_type": "brand_new_llm"})
    for hostile in ("_parts", "../llama", "llama.py", ""):
        with pytest.raises(HeadraceError):
            spec_from_hf(LLAMA | {"model_type": hostile})


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
)
def test_a_missing_key_is_named(key: str) -> None:
    config = {k: v for k, v in LLAMA.items() if k != key}
    with pytest.raises(InvalidInput, match=key):
        spec_from_hf(config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"num_attention_heads": 2**31, "num_key_value_heads": 1, "head_dim": 64}, "num_attention_heads"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"partial_rotary_factor": 0.01}, "rotary"),
        ({"rms_norm_eps": -1}, "norm_eps"),
        ({"rms_norm_eps": float("inf")}, "norm_eps"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "quantum", "factor": 2.0}}, "quantum"),
        ({"torch_dtype": "float7"}, "float7"),
        ({"quantization_config": {"quant_method": "magic"}}, "magic"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": 128}}, "3-bit"),
        ({"eos_token_id": "two"}, "eos_token_id"),
    ],
)
def test_a_contradictory_value_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(HeadraceError, match=named):
        spec_from_hf(LLAMA | change)


def test_layer_types_must_cover_every_layer_with_known_kinds() -> None:
    with pytest.raises(InvalidInput, match="layer_types"):
        spec_from_hf(GEMMA3 | {"layer_types": ["full_attention"] * 3})
    with pytest.raises(InvalidInput, match="diagonal_attention"):
        spec_from_hf(GEMMA3 | {"layer_types": ["diagonal_attention"] * 18})


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data(), case=st.sampled_from(sorted(CASES)))
def test_a_mutated_config_gives_a_spec_or_a_clear_error(data: st.DataObject, case: str) -> None:
    config = json.loads(json.dumps(config_of(case)))
    optional = [
        "rope_scaling",
        "rope_parameters",
        "layer_types",
        "quantization_config",
        "eos_token_id",
        "sliding_window",
    ]
    for key in data.draw(st.lists(st.sampled_from([*config, *optional]), max_size=3)):
        if key != "model_type":
            config[key] = data.draw(_JSON)
    with contextlib.suppress(HeadraceError):  # any other exception fails the test
        assert spec_from_hf(config).num_layers >= 1
