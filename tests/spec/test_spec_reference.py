"""The reference arithmetic of the project: published figures that the accounting must reproduce, each by name."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.base.units import GB
from headrace.spec import accounting, bounds
from headrace.spec.hf import spec_from_hf
from headrace.spec.model import ModelSpec

MISTRAL: dict[str, Any] = {
    "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
    "sliding_window": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_70B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
GPT_OSS_120B: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4,
    "sliding_window": 128, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip
DEEPSEEK_V2: dict[str, Any] = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 5120, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 2, "n_routed_experts": 160, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0, "max_position_embeddings": 163840,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    **DEEPSEEK_V2, "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "n_shared_experts": 1, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "topk_group": 4, "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
}  # fmt: skip


def mistral() -> ModelSpec:
    return spec_from_hf(MISTRAL, "mistral-7b-v0.2")


@pytest.mark.parametrize(("bits", "gigabytes"), [(16, 14.5), (8, 7.2), (4, 3.6)])
def test_mistral_weights_are_parameters_times_bytes(bits: int, gigabytes: float) -> None:
    assert accounting.parameters(mistral()).total == 7_241_732_096
    assert round(accounting.nominal_weight_bytes(mistral(), bits) / GB, 1) == gigabytes


def test_mistral_weights_in_bf16_are_exact() -> None:
    assert accounting.weight_bytes(mistral()).total == 2 * 7_241_732_096


def test_mistral_int4_has_scales_and_keeps_embedding_and_head() -> None:
    """g128 adds one 16-bit scale per 128 weights; embedding, head and norms stay at 16 bit."""
    counted = accounting.parameters(mistral()).by_part
    linear = counted["attention"] + counted["mlp"]
    rest = counted["embedding"] + counted["lm_head"] + counted["norms"]
    assert accounting.weight_bytes(mistral(), "int4-g128").total == linear // 2 + linear // 128 * 2 + 2 * rest


def test_gpt_oss_120b_has_116_8_billion_parameters() -> None:
    assert round(accounting.parameters(spec_from_hf(GPT_OSS_120B)).total / 1e9, 1) == 116.8


def test_gpt_oss_120b_fits_one_80_gb_card_only_in_mxfp4() -> None:
    spec = spec_from_hf(GPT_OSS_120B)
    assert round(accounting.weight_bytes(spec, "bf16").total / GB) == 234
    assert round(accounting.nominal_weight_bytes(spec, 8) / GB) == 117
    mxfp4 = accounting.weight_bytes(spec).total
    assert spec.checkpoint_precision == "mxfp4"
    assert round(mxfp4 / GB) == 65
    assert mxfp4 < 80 * GB < accounting.weight_bytes(spec, "fp8").total


def test_kv_per_token_of_mistral_is_131072_bytes() -> None:
    assert accounting.kv_bytes_per_token(mistral(), "bf16") == 2 * 32 * 8 * 128 * 2 == 131_072


def test_kv_per_token_of_a_70b_with_8_kv_heads_is_327680_bytes() -> None:
    assert accounting.kv_bytes_per_token(spec_from_hf(LLAMA_70B), "bf16") == 327_680


def test_kv_per_user_of_mistral_at_4k_and_16k() -> None:
    assert accounting.kv_bytes(mistral(), "fp16", 4096) == 536_870_912
    assert accounting.kv_bytes(mistral(), "fp16", 16384) == 2_147_483_648


def test_v0_1_window_keeps_16k_at_the_bytes_of_4k() -> None:
    v01 = spec_from_hf(MISTRAL | {"sliding_window": 4096})
    assert accounting.kv_bytes(v01, "fp16", 16384) == accounting.kv_bytes(v01, "fp16", 4096) == 536_870_912


def test_80_users_of_mistral_at_4k_take_43_gb() -> None:
    assert round(80 * accounting.kv_bytes(mistral(), "fp16", 4096) / GB) == 43


def test_kv_precision_does_not_follow_weight_precision() -> None:
    quantized = spec_from_hf(MISTRAL | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}})
    assert quantized.checkpoint_precision == "int4_g128"
    assert accounting.kv_bytes_per_token(quantized, "fp16") == 131_072
    assert accounting.kv_bytes_per_token(quantized, "fp8") == 65_536


def test_mla_of_deepseek_v2_is_69120_bytes_and_its_ratio_depends_on_the_baseline() -> None:
    latent = accounting.kv_bytes_per_token(spec_from_hf(DEEPSEEK_V2), "bf16")
    assert latent == (512 + 64) * 60 * 2 == 69_120
    with_128 = accounting.mha_bytes_per_token(128, 128, 128, 60)
    with_192 = accounting.mha_bytes_per_token(128, 192, 128, 60)
    assert round(with_128 / 1e6, 2) == 3.93
    assert round(with_128 / latent, 1) == 56.9
    assert round(with_192 / latent, 1) == 71.1


def test_the_same_latent_on_mistrals_geometry() -> None:
    latent = (512 + 64) * 32 * 2
    assert round(accounting.mha_bytes_per_token(32, 128, 128, 32) / latent, 1) == 14.2
    assert round(accounting.kv_bytes_per_token(mistral(), "bf16") / latent, 1) == 3.6


def test_gqa_ratio_is_4_and_mqa_32() -> None:
    def with_kv_heads(n: int) -> int:
        return accounting.kv_bytes_per_token(spec_from_hf(MISTRAL | {"num_key_value_heads": n}), "bf16")

    assert with_kv_heads(32) / with_kv_heads(8) == 4
    assert with_kv_heads(32) / with_kv_heads(1) == 32


def test_weights_read_leave_out_the_embedding_table() -> None:
    read = accounting.weights_read_bytes(mistral(), "bf16")
    assert read == 2 * (7_241_732_096 - 32000 * 4096)
    assert round(read / GB, 2) == 14.22


def test_a_tied_embedding_is_read_as_the_head() -> None:
    tied = spec_from_hf(MISTRAL | {"tie_word_embeddings": True})
    assert accounting.weights_read_bytes(tied, "bf16") == accounting.weight_bytes(tied, "bf16").total


def test_weights_read_count_only_the_experts_that_the_batch_touches() -> None:
    spec = spec_from_hf(GPT_OSS_120B)
    one = accounting.weights_read_bytes(spec, "bf16", 1)
    active = accounting.parameters(spec).active - accounting.parameters(spec).by_part["embedding"]
    assert one == pytest.approx(2 * active)
    many = accounting.weights_read_bytes(spec, "bf16", 100_000)
    whole = accounting.weight_bytes(spec, "bf16")
    assert many == pytest.approx(whole.total - whole.by_part["embedding"])
    assert one < accounting.weights_read_bytes(spec, "bf16", 8) < many


def test_users_by_memory() -> None:
    kv = accounting.kv_bytes(mistral(), "fp16", 4096)
    weights = accounting.weight_bytes(mistral()).total
    assert bounds.users_by_memory(80 * GB, weights, 2 * GB, kv) == (80 * GB - weights - 2 * GB) // kv == 118
    assert bounds.users_by_memory(10 * GB, weights, 0, kv) == 0


def test_itl_floor_counts_weights_and_kv_reads() -> None:
    read = accounting.weights_read_bytes(mistral())
    kv = accounting.kv_bytes(mistral(), "fp16", 4096)
    floor = bounds.itl_floor_s(read, 32 * kv, 3.35e12)
    assert floor == pytest.approx((14.2213e9 + 32 * 0.536871e9) / 3.35e12, rel=1e-4)
    assert bounds.throughput_tokens_per_s(32, floor) == pytest.approx(32 / floor)
    assert bounds.batch_one_ceiling_tokens_per_s(read, 3.35e12) == pytest.approx(
        1 / bounds.itl_floor_s(read, 0, 3.35e12)
    )


def test_ten_dollars_an_hour_at_4000_tokens_per_second() -> None:
    assert round(bounds.usd_per_million_tokens(10, 4000), 2) == 0.69
    assert bounds.usd_per_million_tokens(1, 1) == pytest.approx(277.8, abs=0.03)


def test_speculation_of_four_at_acceptance_0_8() -> None:
    assert round(bounds.speculation_tokens(0.8, 4), 2) == 3.36
    assert round(bounds.speculation_speedup(0.8, 4, 0.1), 1) == 2.4
    assert bounds.speculation_tokens(1.0, 4) == 5
    assert bounds.speculation_tokens(0.0, 4) == 1


def test_deepseek_v3_has_671_billion_parameters_of_which_37_are_active() -> None:
    counted = accounting.parameters(spec_from_hf(DEEPSEEK_V3))
    assert round(counted.total / 1e9) == 671
    assert round(counted.active / 1e9, 1) == 37.6  # 36.7 without the embedding table, the report's "37B"
    assert round(counted.by_part["mtp"] / 1e9, 1) == 11.6  # 14 B with its own copies of embedding and head


def test_deepseek_v3_fp8_blocks_count_their_scales() -> None:
    spec = spec_from_hf(DEEPSEEK_V3)
    assert spec.checkpoint_precision == "fp8_block128"
    counted = accounting.parameters(spec).by_part
    experts = accounting.weight_bytes(spec).by_part["experts"]
    assert experts == counted["experts"] + counted["experts"] // 128**2 * 4
    assert accounting.weight_bytes(spec).by_part["embedding"] == 2 * counted["embedding"]


def test_active_parameters_are_for_compute_and_total_ones_for_memory() -> None:
    spec = spec_from_hf(GPT_OSS_120B)
    counted = accounting.parameters(spec)
    assert round(counted.active / 1e9, 1) == 5.7  # "5.1B" leaves out the embedding table
    assert accounting.weight_bytes(spec, "bf16").total == 2 * counted.total
    per_token = sum(accounting.gemm_flops_per_token(spec).values()) + accounting.head_flops_per_row(spec)
    assert per_token < 2 * counted.active < 2 * counted.total
