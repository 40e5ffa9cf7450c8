"""The mistakes of popular calculators, each as a test that would catch it here, and the reference arithmetic."""

import pytest

from headrace.base.units import GIB
from headrace.plan.costs.work import rank_model, step_work
from headrace.plan.deployment import Inputs, find_model, resolve
from headrace.plan.economics import dollars_per_million
from headrace.plan.fit import fit
from headrace.plan.workload import expected_tokens
from headrace.spec import accounting, hardware
from headrace.spec.accounting import Span


def plan(model, gpu="h100-sxm-80", gpus=1, context=4096, **more):
    return fit(Inputs(model=model, gpu=gpu, n_gpus=gpus, tp=gpus, **more), context)


def test_mha_formula_for_gqa():
    assert plan("mistral-7b").kv_bytes_per_token == 131_072
    assert plan("llama-3.1-70b", gpus=4, weights="bf16").kv_bytes_per_token * 4 == 327_680
    mha = accounting.mha_bytes_per_token(32, 128, 128, 32)
    assert mha / plan("mistral-7b").kv_bytes_per_token == 4


def test_mla_is_not_divided_by_tp():
    one = accounting.kv_bytes_per_token(find_model("deepseek-v2").spec, "bf16")
    assert one == 69_120
    for tp in (2, 4, 8):
        assert plan("deepseek-v2", gpu="h200-sxm-141", gpus=tp, weights="fp8").kv_bytes_per_token == one
    # Data-parallel attention is what divides the requests.
    spread = Inputs(model="deepseek-v3", gpu="h200-sxm-141", n_gpus=8, tp=1, dp=8, ep=8)
    whole = Inputs(model="deepseek-v3", gpu="h200-sxm-141", n_gpus=8, tp=8)
    assert fit(spread, 8192).max_users > 2 * fit(whole, 8192).max_users


def test_gqa_beyond_its_kv_heads_is_replicated_not_divided():
    four, eight = (plan("qwen3-235b-a22b", gpu="h200-sxm-141", gpus=n, weights="fp8") for n in (4, 8))
    assert four.kv_bytes_per_token == eight.kv_bytes_per_token == 94 * 2 * 128 * 2


def test_a_hybrid_is_not_charged_for_every_layer():
    found = plan("qwen3.5-35b-a3b", gpu="h200-sxm-141")
    # 10 of 40 layers keep keys and values: 2 heads of 256.
    assert found.kv_bytes_per_token == 10 * 2 * 2 * 256 * 2
    # The other 30 keep a state: 32 heads of 128 x 128 in fp32, and three inputs of the convolution.
    assert found.kv_fixed_bytes_per_request == 30 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2)


def test_a_sliding_window_caps_the_cache():
    windowed, full = plan("mistral-7b-v0.1", context=16_384), plan("mistral-7b", context=16_384)
    assert windowed.kv_bytes_per_token == 0
    assert windowed.kv_fixed_bytes_per_request == 4096 * 131_072
    assert full.kv_bytes_per_token == 131_072


def test_marketing_gb():
    found = plan("llama-3.1-8b")
    assert found.usable_bytes == round(79.2 * GIB)
    assert found.usable_bytes != 80 * GIB


def test_sparse_tflops():
    assert hardware.find("h200-sxm-141").peak_flops("fp8") == 1979e12


def test_kv_bytes_do_not_follow_the_weight_precision():
    assert len({plan("llama-3.1-8b", weights=w).kv_bytes_per_token for w in ("bf16", "fp8", "int4", "nf4")}) == 1
    sixteen, eight = plan("llama-3.1-8b", kv="bf16"), plan("llama-3.1-8b", kv="fp8")
    assert sixteen.kv_bytes_per_token == 2 * eight.kv_bytes_per_token
    assert sixteen.weights_bytes == eight.weights_bytes


def test_active_parameters_for_compute_total_for_memory():
    found = plan("mixtral-8x7b", gpus=2, weights="bf16")
    assert found.weights_bytes * 2 > 2 * 46_702_792_704
    m = rank_model(resolve(Inputs(model="mixtral-8x7b", gpu="h200-sxm-141", weights="bf16")))
    w = step_work(m, prefill=[Span(0, 1, sample=False)])
    assert w.gemm_flops + w.gemm16_flops + w.expert_flops < 2 * 13e9
    assert w.expert_flops == pytest.approx(2 * 2 * 3 * 4096 * 14336 * 32)


def test_a_small_batch_does_not_read_every_expert():
    m = rank_model(resolve(Inputs(model="qwen3-30b-a3b", gpu="h100-sxm-80", weights="bf16")))
    one, many = (step_work(m, decode=[(n, 1024)]).expert_bytes for n in (1, 1000))
    assert one == pytest.approx(m.expert_bytes * 8 / 128)
    assert many == pytest.approx(m.expert_bytes, rel=1e-6)


def test_activation_follows_the_chunk_not_the_batch():
    def activation(**more):
        return plan("llama-3.1-8b", engine="llama-cpp", **more).activation_bytes

    assert activation(max_batched_tokens=1024) > activation(max_batched_tokens=256)
    assert activation(max_num_seqs=1) == activation(max_num_seqs=64)
    chunks = [plan("mistral-7b", max_batched_tokens=n).activation_bytes for n in (8192, 16_384, 32_768)]
    assert chunks[2] == 2 * chunks[1] == 4 * chunks[0]
    in_flight = [plan("mistral-7b", max_batched_tokens=8192, concurrency=n).activation_bytes for n in (1, 512)]
    assert in_flight == [chunks[0]] * 2


def test_draft_layers_are_not_forgotten():
    def v3(drafts):
        return plan("deepseek-v3", gpu="h200-sxm-141", gpus=8, draft_tokens=drafts)

    without, with_drafts = v3(0), v3(1)
    extra = (with_drafts.weights_bytes - without.weights_bytes) * 8
    assert 11e9 < extra < 14e9  # about 11.5 B parameters in fp8
    assert with_drafts.kv_bytes_per_request > without.kv_bytes_per_request


def test_fp8_scales_and_indexer_keys_count():
    spec = find_model("deepseek-v3").spec
    by_part = accounting.weight_bytes(spec, "fp8_block128").by_part
    elements = accounting.parameters(spec).by_part["experts"]
    assert by_part["experts"] == elements + elements // (128 * 128) * 4
    with_indexer = accounting.kv_bytes_per_token(find_model("deepseek-v3.2").spec, "bf16")
    assert with_indexer - accounting.kv_bytes_per_token(spec, "bf16") == 61 * (128 + 4)


def test_dollars_per_million_are_not_off_by_a_thousand():
    assert dollars_per_million(10, 4000) == pytest.approx(0.694, abs=1e-3)
    assert dollars_per_million(1, 277.7777) == pytest.approx(1.0, rel=1e-5)


def test_a_70b_does_not_fit_on_one_40_gb_card():
    found = plan("llama-3.1-70b", gpu="a100-sxm-40", weights="bf16")
    assert not found.fits
    assert found.limit == "weights"
    assert not plan("llama-3.1-70b", gpu="a100-sxm-40", weights="fp8").fits


def test_gpt_oss_120b_fits_one_80_gb_card_in_mxfp4_only():
    assert plan("gpt-oss-120b", weights="mxfp4").fits
    assert not plan("gpt-oss-120b", weights="fp8").fits
    assert not plan("gpt-oss-120b", weights="bf16").fits


def test_decode_reads_the_cache_and_not_the_embedding_table():
    m = rank_model(resolve(Inputs(model="mistral-7b", gpu="h100-sxm-80", weights="bf16")))
    w = step_work(m, decode=[(80, 4096)])
    assert w.gemm_bytes == pytest.approx(14.22e9, rel=1e-3)
    assert w.decode_attention_bytes == 80 * 4096 * 131_072


def test_speculation_expects_the_truncated_geometric_sum():
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert expected_tokens(0.8, 0) == 1.0


def test_kv_of_mistral_at_four_thousand_tokens():
    assert plan("mistral-7b", context=4096).kv_bytes_per_request == 536_870_912


def test_unquantized_parts_stay():
    spec = find_model("llama-3.1-8b").spec
    stored = accounting.weight_bytes(spec, "fp8").by_part
    assert stored["embedding"] == stored["lm_head"] == 128_256 * 4096 * 2
