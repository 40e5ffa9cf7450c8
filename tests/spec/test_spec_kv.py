"""KV-cache arithmetic: against transformers' real caches, at windows, in blocks, and as a line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_spec_parameters import CASES, built_on_cpu, config_of
from test_spec_reference import DEEPSEEK_V2, GPT_OSS_120B, MISTRAL

from headrace.base.errors import DoesNotFit, InvalidInput, UnsupportedModel
from headrace.spec import accounting
from headrace.spec.cache import CacheLayout
from headrace.spec.ggml import GGML_TYPES_BY_NAME
from headrace.spec.hf import spec_from_hf

GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048,
    "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
    "max_position_embeddings": 32768,
}  # fmt: skip

# Falcon's 40B form repeats its KV heads in transformers' cache (a known waste); lightning states live outside its tensors.
NOT_COMPARABLE = {"falcon-40b", "minimax"}


@pytest.mark.parametrize("case", [case for case in CASES if case not in NOT_COMPARABLE])
def test_kv_bytes_equal_the_cache_of_transformers(case: str) -> None:
    """After 20 tokens in fp32. Its convolution states keep one column more than the next step needs, we do not."""
    import torch

    tokens = 20
    model = built_on_cpu(case)
    with torch.no_grad():
        output = model(torch.arange(tokens)[None], use_cache=True)
    cache = output.past_key_values if getattr(output, "past_key_values", None) is not None else output.cache_params
    spec = spec_from_hf(config_of(case))
    kernels = {
        m.conv_kernel for layer in spec.layers for m in (layer.mixer, layer.parallel_ssm) if hasattr(m, "conv_kernel")
    }
    real = 0
    for layer in cache.layers:
        for name in ("keys", "values"):
            real += _bytes(getattr(layer, name, None))
        real += _bytes(getattr(layer, "recurrent_states", None))
        if (convolution := _bytes(getattr(layer, "conv_states", None))) > 0:
            (kernel,) = kernels
            real += convolution * (kernel - 1) // kernel
    index = sum(
        accounting.index_token_bytes(layer.mixer) * tokens for layer in spec.layers if hasattr(layer.mixer, "indexer")
    )  # ours are fp8 as the checkpoint's authors serve them
    assert accounting.kv_bytes(spec, "fp32", tokens) - index == real


def _bytes(value: Any) -> int:
    import torch

    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_bytes(v) for v in value.values())
    if isinstance(value, list | tuple):
        return sum(_bytes(v) for v in value)
    return 0


def test_a_sliding_layer_stops_growing_and_a_full_one_does_not() -> None:
    spec = spec_from_hf(GEMMA3)
    per_layer = 2 * 1 * 256 * 2
    assert accounting.kv_bytes_per_token(spec, "bf16") == 18 * per_layer
    assert accounting.kv_bytes_per_token_by_kind(spec, "bf16") == {"sliding": 15 * per_layer, "full": 3 * per_layer}
    at_window = accounting.kv_bytes(spec, "bf16", 512)
    assert at_window == 512 * 18 * per_layer
    assert accounting.kv_bytes(spec, "bf16", 5120) == at_window + (5120 - 512) * 3 * per_layer
    line = accounting.kv_line(spec, "bf16", 5120)
    assert (line.fixed_bytes, line.slope_bytes) == (15 * 512 * per_layer, 3 * per_layer)


def test_a_chunked_layer_falls_back_at_each_chunk() -> None:
    cache = accounting.LayerCache("chunked", 10, window=8, chunked=True)
    assert [cache.tokens(n) for n in (0, 1, 8, 9, 16, 17)] == [0, 1, 8, 1, 8, 1]


@given(context=st.integers(0, 500), window=st.integers(1, 80), block=st.integers(1, 40))
def test_blocks_cover_exactly_the_tokens_that_are_seen(context: int, window: int, block: int) -> None:
    cache = accounting.LayerCache("sliding", 1, window=window)
    seen = range(max(0, context - window), context)
    assert cache.tokens(context) == len(seen)
    assert cache.blocks(context, block) == len({position // block for position in seen})


@given(context=st.integers(0, 20_000))
def test_the_line_meets_the_curve_where_it_is_taken(context: int) -> None:
    for config in (GEMMA3, GPT_OSS_120B, MISTRAL, DEEPSEEK_V2):
        spec = spec_from_hf(config)
        assert accounting.kv_line(spec, "bf16", context).at(context) == accounting.kv_bytes(spec, "bf16", context)


def test_cross_layer_sharing_has_no_cache_of_its_own() -> None:
    spec = spec_from_hf(config_of("gemma3n"))
    owners = [layer for layer in spec.layers if layer.mixer.kv_source is None]  # type: ignore[union-attr]
    assert len(owners) == 6
    assert accounting.kv_bytes_per_token(spec, "bf16") == 6 * 2 * 2 * 16 * 2
    sources = {layer.mixer.kv_source for layer in spec.layers} - {None}  # type: ignore[union-attr]
    assert sources == {4, 5}


def test_a_recurrent_state_does_not_depend_on_context() -> None:
    spec = spec_from_hf(config_of("mamba2"))
    assert accounting.kv_bytes(spec, "bf16", 1) == accounting.kv_bytes(spec, "bf16", 100_000)
    # inner 128 x state 16 in fp32; (128 + 2·2·16) channels x 3 inputs in bf16
    assert accounting.kv_fixed_bytes(spec, "bf16") == 4 * (128 * 16 * 4 + 192 * 3 * 2)
    assert accounting.kv_bytes_per_token(spec, "bf16") == 0


def test_a_hybrid_charges_only_its_attention_layers_per_token() -> None:
    spec = spec_from_hf(config_of("qwen3_next"))
    assert accounting.kv_bytes_per_token(spec, "bf16") == 1 * 2 * 2 * 16 * 2


def test_sparse_mla_counts_scales_and_indexer_keys() -> None:
    v32 = spec_from_hf(
        DEEPSEEK_V2 | {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    )
    assert accounting.kv_bytes_per_token(v32, "bf16") == 60 * (576 * 2 + 128 + 4)
    assert accounting.kv_bytes_per_token(v32, "fp8") == 60 * (512 + 16 + 128 + 128 + 4)
    plain = spec_from_hf(DEEPSEEK_V2)
    assert accounting.kv_bytes_per_token(plain, "fp8") == 60 * 576


def test_quantized_kv_counts_its_scales() -> None:
    """INT8 per token and head; INT4 so for values, and for keys per channel of 32 tokens."""
    spec = spec_from_hf(MISTRAL)
    assert accounting.kv_bytes_per_token(spec, "int8") == 32 * 8 * 2 * (128 + 2)
    assert accounting.kv_bytes_per_token(spec, "int4") == 32 * 8 * ((64 + 128 * 4 // 32) + (64 + 4))
    layout = accounting.cache_layout(spec, "int4", 32)
    assert layout.bytes_per_block == 32 * 32 * 8 * (80 + 68)
    assert layout.whole_blocks
    assert not accounting.cache_layout(spec, "int8", 32).whole_blocks
    assert (accounting.default_block_tokens("int8"), accounting.default_block_tokens("int4")) == (16, 32)
    assert accounting.kv_staging_bytes(spec, "int4", 64, "fp16") == 64 * 32 * 32 * 8 * 128 * 2
    assert accounting.kv_staging_bytes(spec, "int8", 64, "fp16") == 0


@pytest.mark.parametrize(
    ("kv", "vector"),
    [
        ("nvfp4", 128 // 2 + 128 // 16),  # E2M1 pairs and an E4M3 scale for 16
        ("q8_0", 4 * 34),  # ggml blocks of 32: an fp16 scale and 32 bytes
        ("q5_1", 4 * 24),
        ("q5_0", 4 * 22),
        ("q4_1", 4 * 20),
        ("q4_0", 4 * 18),
        ("iq4_nl", 4 * 18),
    ],
)
def test_formats_of_other_engines_count_their_scales(kv: str, vector: int) -> None:
    spec = spec_from_hf(MISTRAL)
    assert accounting.kv_bytes_per_token(spec, kv) == 32 * 8 * 2 * vector
    if kv in GGML_TYPES_BY_NAME and kv != "nvfp4":
        stored = GGML_TYPES_BY_NAME[kv]
        assert vector == 128 // stored.block_elements * stored.block_bytes


def test_the_layout_of_sparse_latents_is_for_latents() -> None:
    """512 bytes in fp8, four fp32 scales and a rotary key in 16 bit, with or without an indexer; no heads."""
    plain = spec_from_hf(DEEPSEEK_V2)
    assert accounting.kv_bytes_per_token(plain, "fp8_ds_mla") == 60 * 656
    sparse = {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    v32 = spec_from_hf(DEEPSEEK_V2 | sparse)
    assert accounting.kv_bytes_per_token(v32, "fp8_ds_mla") == accounting.kv_bytes_per_token(v32, "fp8")
    with pytest.raises(InvalidInput, match="latents of MLA"):
        accounting.kv_bytes_per_token(spec_from_hf(MISTRAL), "fp8_ds_mla")


def test_one_kind_of_layer_is_one_group() -> None:
    layout = accounting.cache_layout(spec_from_hf(MISTRAL), "fp16", 16)
    assert layout.num_groups == 1
    assert layout.bytes_per_block == 16 * 131_072
    assert layout.place(31) == (0, 31)
    assert accounting.request_blocks(layout, 33) == 3


def test_gemma3_is_cut_into_groups_of_three_without_padding() -> None:
    layout = accounting.cache_layout(spec_from_hf(GEMMA3), "fp16", 16)
    assert layout.layers_per_group == 3
    assert sorted(g.window or 0 for g in layout.groups) == [0, 512, 512, 512, 512, 512]
    assert sorted(i for g in layout.groups for i in g.layers) == list(range(18))
    assert layout.bytes_per_block == 3 * 16 * 2 * 256 * 2
    # 2,000 tokens: the full group keeps 125 blocks, each sliding one those that hold the last 512.
    assert accounting.request_blocks(layout, 2000) == 125 + 5 * len({i // 16 for i in range(1488, 2000)})


def test_uneven_groups_are_padded_and_the_padding_is_paid_for() -> None:
    layout = accounting.cache_layout(spec_from_hf(GEMMA3 | {"num_hidden_layers": 26}), "fp16", 16)
    assert layout.layers_per_group == 4  # 22 sliding layers in six groups, two slots empty; 4 full layers in one
    assert layout.num_groups == 7
    assert layout.bytes_per_block == 4 * 16 * 2 * 256 * 2
    assert sum(len(g.layers) for g in layout.groups) == 26


def test_layout_bytes_per_token_are_those_of_the_model_plus_padding() -> None:
    even, uneven = spec_from_hf(GEMMA3), spec_from_hf(GEMMA3 | {"num_hidden_layers": 26})
    per_layer = 2 * 256 * 2
    for spec, padding in ((spec_from_hf(MISTRAL), 0), (even, 0), (uneven, 2 * per_layer)):
        layout = accounting.cache_layout(spec, "fp16", 16)
        assert accounting.layout_bytes_per_token(layout) == accounting.kv_bytes_per_token(spec, "fp16") + padding


def test_a_window_as_long_as_the_context_is_no_window() -> None:
    layout = accounting.cache_layout(
        spec_from_hf(MISTRAL | {"sliding_window": 32768, "max_position_embeddings": 32768}), "fp16", 16
    )
    assert [g.window for g in layout.groups] == [None]


def test_mla_is_one_head_of_latent_and_rotary_key() -> None:
    layout = accounting.cache_layout(spec_from_hf(DEEPSEEK_V2), "bf16", 64)
    assert (layout.num_kv_heads, layout.head_dim, layout.value_dim) == (1, 576, 0)
    assert layout.bytes_per_block == 64 * 69_120


def test_models_that_cannot_share_a_pool_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no attention layers"):
        accounting.cache_layout(spec_from_hf(config_of("mamba")), "bf16", 16)
    with pytest.raises(UnsupportedModel, match="chunked"):
        accounting.cache_layout(spec_from_hf(config_of("llama4")), "bf16", 16)


@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_group_size_never_wastes_more_than_a_tenth(counts: list[int]) -> None:
    size = accounting.group_size(counts)
    slots = sum(-(-n // size) * size for n in counts)
    assert 1 <= size <= max(counts)
    assert slots - sum(counts) <= 0.1 * sum(counts)


def test_pool_blocks_fill_memory_and_refuse_too_little() -> None:
    layout = accounting.cache_layout(spec_from_hf(MISTRAL), "fp16", 16)
    assert accounting.pool_blocks(10 * layout.bytes_per_block + 5, layout) == 10
    assert accounting.pool_tokens(10, layout) == 160
    with pytest.raises(DoesNotFit, match=str(layout.bytes_per_block)):
        accounting.pool_blocks(layout.bytes_per_block - 1, layout)


@given(context=st.integers(1, 4000), block=st.sampled_from([1, 8, 16, 64]))
def test_pool_blocks_of_a_request_hold_at_least_its_kv_bytes(context: int, block: int) -> None:
    spec = spec_from_hf(GEMMA3)
    layout: CacheLayout = accounting.cache_layout(spec, "fp16", block)
    held = accounting.request_blocks(layout, context) * layout.bytes_per_block
    assert held >= accounting.kv_bytes(spec, "fp16", context)
    assert held == accounting.kv_bytes(spec, "fp16", context, block_tokens=block)  # no padding in this model
