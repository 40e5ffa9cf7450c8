"""Memory plans: measured start-up logs, engines' own rules, and what must hold whatever the numbers."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import InvalidInput
from headrace.base.units import GIB
from headrace.plan.costs.work import rank_model
from headrace.plan.deployment import Inputs, resolve
from headrace.plan.fit import fit, max_context_for, rank_memory
from headrace.plan.pool import BytePool, PagedPool, SplitPool, vllm_pool
from headrace.spec import models
from headrace.spec.accounting import LayerCache
from headrace.spec.locate import locate
from headrace.spec.sharding import Layout, rank_spec

VLLM_011 = {"engine": "vllm", "engine_version": "0.11.0", "max_model_len": 16_000, "block_tokens": 128}


@pytest.mark.parametrize(
    ("model", "gpus", "weights", "fraction", "weights_gib", "kv_gib"),
    [
        ("gpt-oss-20b", 1, "mxfp4", 0.9, 13.47, 50.28),
        ("llama-3.3-70b", 2, "fp8_channel", 0.9, 33.88, 32.0),
        ("llama-3.1-8b", 1, "bf16", 0.9, 14.99, 51.38),
        ("qwen3-32b", 2, "bf16", 0.9, 30.59, 34.49),
        ("mistral-small-3.2-24b", 1, "bf16", 0.95, 44.76, 28.2),
    ],
)
def test_start_up_logs_of_vllm_0_11(model, gpus, weights, fraction, weights_gib, kv_gib):
    inputs = Inputs(
        model=model, gpu="H100-80GB (79.18 GiB)", n_gpus=gpus, weights=weights, memory_fraction=fraction, **VLLM_011
    )
    found = fit(inputs, 16_000)
    assert found.weights_bytes / GIB == pytest.approx(weights_gib, rel=0.005)
    assert found.kv_pool_bytes / GIB == pytest.approx(kv_gib, rel=0.01)
    assert found.outside_fraction_bytes > 0  # graphs lie outside the fraction in this version
    assert any("outside the memory fraction" in note for note in found.notes)


def test_the_token_counts_that_vllm_0_24_prints_for_mixed_layers():
    gemma = Inputs(model="gemma-4-31b", gpu="h200-sxm-141", engine="vllm", engine_version="0.24.0")
    d = resolve(gemma)
    caches = rank_memory(d).caches
    pool = vllm_pool(
        round(64.68 * GIB),
        caches,
        block_tokens=16,
        copies=2,
        step_tokens=8192,
        max_model_len=262_144,
        by_concurrency=True,
    )
    assert pool.tokens == pytest.approx(626_949, rel=1e-3)
    hybrid = Inputs(
        model="qwen3.5-35b-a3b", gpu="rtx-5090-32", engine="vllm", engine_version="0.24.0", weights="nvfp4", kv="fp8"
    )
    caches = rank_memory(resolve(hybrid)).caches
    pool = vllm_pool(
        round(6.01 * GIB),
        caches,
        block_tokens=16,
        copies=2,
        step_tokens=8192,
        max_model_len=131_072,
        by_concurrency=True,
    )
    assert pool.tokens == 569_878


def test_a_context_that_does_not_fit_names_the_term():
    inputs = Inputs(
        model="llama-3.1-8b",
        gpu="RTX 3090 (23.58 GiB)",
        engine_version="0.6.4",
        max_model_len=29_000,
        chunked_prefill=False,
        memory_fraction=0.9,
    )
    found = fit(inputs, 29_000)
    assert not found.fits
    assert found.limit == "kv_pool"
    assert found.max_users == 0
    assert 0 < found.max_context < 29_000
    assert fit(inputs, found.max_context).fits
    assert not fit(inputs, found.max_context + 64).fits


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama-cpp", "headrace"])
def test_the_bill_adds_up(engine):
    found = fit(Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", engine=engine), 8192)
    assert found.fits
    bill = sum(item.nbytes for item in found.items)
    assert bill <= found.usable_bytes
    assert sum(i.nbytes for i in found.items if i.name.startswith("weights")) == found.weights_bytes
    assert found.kv_bytes_per_request == pytest.approx(8192 * 131_072, rel=0.01)
    assert found.explain
    assert found.figures["kv_pool_bytes"].low <= found.kv_pool_bytes <= found.figures["kv_pool_bytes"].high


@settings(max_examples=30, deadline=None)
@given(
    model=st.sampled_from(["llama-3.1-8b", "gpt-oss-20b", "qwen3.5-27b", "gemma-3-12b", "deepseek-v2-lite"]),
    engine=st.sampled_from(["vllm", "sglang", "tensorrt-llm", "llama-cpp"]),
    context=st.integers(64, 30_000),
    fraction=st.floats(0.5, 0.95),
)
def test_more_context_never_means_more_users_and_more_memory_never_fewer(model, engine, context, fraction):
    def users(tokens, share):
        inputs = Inputs(model=model, gpu="h200-sxm-141", engine=engine, memory_fraction=share, max_model_len=32_768)
        return fit(inputs, tokens).max_users

    assert users(context, fraction) >= users(context * 2, fraction)
    assert users(context, fraction) <= users(context, min(0.99, fraction + 0.04))


def test_context_for_a_number_of_users_inverts_users_at_a_context():
    inputs = Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", engine="vllm", max_num_seqs=1000)
    context = max_context_for(inputs, 40)
    assert fit(inputs, context).max_users >= 40
    assert fit(inputs, context + 32).max_users < 40


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"memory_fraction": 1.2}, "memory_fraction"),
        ({"tp": 3, "n_gpus": 3}, "tp"),
        ({"tp": 8}, "gpus"),
        ({"gpu": "h101"}, "gpu"),
        ({"engine": "vlm"}, "engine"),
        ({"weights": "int3"}, "precision"),
        ({"kv": "int3"}, "kv_precision"),
        ({"isl": 0}, "isl"),
        ({"n_gpus": 3, "tp": 2}, "gpus"),
        ({"engine": "tensorrt-llm", "gpu": "mi300x-192"}, "engine"),
    ],
)
def test_bad_input_names_the_field(change, field):
    with pytest.raises(InvalidInput) as caught:
        resolve(Inputs(**({"model": "llama-3.1-8b", "gpu": "h100-sxm-80"} | change)))
    assert caught.value.field == field


def test_a_rank_holds_its_share():
    from headrace.plan.deployment import find_model
    from headrace.spec.accounting import kv_bytes_per_token, weight_bytes

    spec = find_model("llama-3.1-70b").spec
    whole = weight_bytes(spec, "bf16").total
    for tp in (2, 4, 8):
        share = rank_spec(spec, Layout(tp=tp))
        assert weight_bytes(share, "bf16").total == pytest.approx(whole / tp, rel=1e-3)
        assert kv_bytes_per_token(share, "bf16") == 327_680 // tp
    moe = find_model("deepseek-v3").spec
    spread = rank_spec(moe, Layout(tp=1, dp=8, ep=8))
    parts = weight_bytes(spread, "fp8_block128").by_part
    whole_parts = weight_bytes(moe, "fp8_block128").by_part
    assert parts["experts"] == pytest.approx(whole_parts["experts"] / 8, rel=0.01)
    assert parts["attention"] == whole_parts["attention"]


def test_pools_follow_their_rules():
    full, windowed, state = (
        LayerCache("full", 100),
        LayerCache("sliding", 100, 64),
        LayerCache("linear", fixed_bytes=5000),
    )
    assert BytePool(160_000, (full, full), 16).tokens == 800
    assert BytePool(160_000, (full, full), 16).users(100) == 160_000 // (112 * 200)
    paged = vllm_pool(
        10**6,
        (full, windowed, windowed, windowed),
        block_tokens=16,
        copies=1,
        step_tokens=32,
        max_model_len=1000,
        by_concurrency=False,
    )
    assert isinstance(paged, PagedPool)
    assert paged.request_pages(1000) == 63 + 3 * (6 + 1)
    grown = vllm_pool(
        10**7, (full, state), block_tokens=16, copies=2, step_tokens=32, max_model_len=1000, by_concurrency=True
    )
    assert grown.full_block == 64  # 64 tokens of 100 bytes hold a state of 5,000
    split = SplitPool(10**6, (full, windowed), 1)
    assert split.tokens == int(10**6 / (100 + 80))


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        ("Qwen/Qwen3-32B", "bf16"),
        ("Qwen/Qwen3-235B-A22B-FP8", "fp8_block128"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "fp8_channel"),
        ("RedHatAI/Llama-3.3-70B-Instruct-quantized.w4a16", "int4_g128"),
        ("nvidia/Qwen3-32B-NVFP4", "nvfp4"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8", "int8_g128"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4", "int4_g128"),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "int4_g128_asym"),
        ("RedHatAI/Llama-3.1-8B-Instruct-quantized.w8a16", "int8"),
        ("unsloth/Llama-3.1-8B-Instruct-bnb-4bit", "nf4"),
        ("amd/Llama-3.3-70B-Instruct-MXFP4-Preview", "mxfp4"),
        ("openai/gpt-oss-20b", "mxfp4"),
        ("deepseek-ai/DeepSeek-R1", "fp8_block128"),
    ],
)
def test_auto_is_the_precision_of_the_checkpoint_that_was_named(model, weights):
    assert resolve(Inputs(model=model, gpu="b200-sxm-180", n_gpus=8, engine="vllm")).weights == weights
    assert resolve(Inputs(model=model, gpu="b200-sxm-180", n_gpus=8, engine="vllm", weights="bf16")).weights == "bf16"


@pytest.mark.parametrize(
    ("quantization", "engine", "kv"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "vllm", "fp8"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "headrace", "bf16"),
        ({"kv_cache_scheme": None}, "vllm", "bf16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "vllm", "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None}, "vllm", "bf16"),
    ],
)
def test_vllm_takes_the_cache_that_a_checkpoint_was_made_for(tmp_path, quantization, engine, kv):
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    stored = {"quant_method": "compressed-tensors", "config_groups": {"a": group}, **quantization}
    config = {**models.find("llama-3.1-8b").config, "quantization_config": stored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = Inputs(model=str(tmp_path), gpu="h100-sxm-80", engine=engine)
    assert resolve(asked).kv == kv
    assert resolve(msgspec.structs.replace(asked, kv="bf16")).kv == "bf16"
    named = Inputs(model="amd/Llama-3.1-8B-Instruct-FP8-KV", gpu="h100-sxm-80", engine=engine)
    assert resolve(named).kv == ("fp8" if engine == "vllm" else "bf16")


def test_four_bit_keys_have_their_staging_and_their_blocks():
    """148 B per head and token; keys of unfinished groups of 32 lie beside the pool in 16 bit, a block holds whole groups."""
    asked = {
        "model": "mistral-7b",
        "gpu": "h100-sxm-80",
        "engine": "headrace",
        "max_num_seqs": 64,
        "max_model_len": 4096,
    }
    found, wider = fit(Inputs(kv="int4", **asked)), fit(Inputs(kv="int8", **asked))
    assert found.kv_bytes_per_token == 32 * 8 * 148
    staging = 64 * 32 * 32 * 8 * 128 * 2
    assert found.overhead_bytes - wider.overhead_bytes == staging
    assert wider.kv_pool_bytes - found.kv_pool_bytes == staging
    assert next(item.nbytes for item in found.items if item.name == "kv staging") == staging
    assert "- keys of unfinished groups (int4, 64 sequences): 128 MiB" in found.explain
    assert resolve(Inputs(kv="int4", **asked)).block_tokens == 32
    assert not any(item.name == "kv staging" for item in wider.items)


def test_the_longest_context_is_what_one_request_may_have_not_what_was_asked():
    found = fit(Inputs(model="mistral-7b", gpu="l4-24", max_model_len=4096), 4096)
    assert 4096 < found.max_context == 32768 <= found.kv_pool_tokens
    tight = fit(Inputs(model="qwen2.5-14b", gpu="a100-sxm-40", max_model_len=4096), 4096)
    assert 4096 < tight.max_context < 131072
    assert fit(Inputs(model="qwen2.5-14b", gpu="a100-sxm-40", max_model_len=tight.max_context), tight.max_context).fits
    assert not fit(Inputs(model="qwen2.5-14b", gpu="a100-sxm-40", max_model_len=131072), tight.max_context + 64).fits


def test_experts_of_a_model_without_any_are_not_spread():
    spread = resolve(Inputs(model="mistral-7b", gpu="h100-sxm-80", n_gpus=2, tp=1, ep=2))
    plain = resolve(Inputs(model="mistral-7b", gpu="h100-sxm-80", n_gpus=2, tp=1))
    assert (spread.layout, spread.replicas) == (plain.layout, plain.replicas)
    assert "ep 2 is taken as 1: mistral-7b has no experts to spread" in spread.notes
    assert resolve(Inputs(model="gpt-oss-20b", gpu="h100-sxm-80", n_gpus=2, tp=1, ep=2)).layout.ep == 2


@pytest.mark.parametrize(
    "asked",
    [
        Inputs(model="deepseek-v3", gpu="h200-sxm-141", n_gpus=8, tp=8),
        Inputs(model="deepseek-v3", gpu="h200-sxm-141", n_gpus=8, tp=1, dp=8, ep=8),
        *(Inputs(model="qwen3.5-27b", gpu="l4-24", engine=e) for e in ("vllm", "sglang", "tensorrt-llm", "llama-cpp")),
        *(Inputs(model="gpt-oss-120b", gpu="l4-24", engine=e) for e in ("vllm", "sglang", "headrace")),
    ],
    ids=lambda i: f"{i.model}-{i.engine}-dp{i.dp}",
)
def test_figures_are_those_of_the_answer_whether_it_fits_or_not(asked):
    found = fit(asked, 8192)
    assert found.fits == (asked.gpu == "h200-sxm-141")
    for name, figure in found.figures.items():
        assert figure.value == getattr(found, name), name
        assert 0 <= figure.low <= figure.value <= figure.high, name


@pytest.mark.parametrize("tp", [1, 3])
def test_a_gguf_file_is_planned_with_the_bytes_of_its_own_mix_of_types(tp):
    files = locate("smollm2-135m")
    asked = Inputs(model=str(files.weights[0]), gpu="l4-24", n_gpus=tp, engine="llama-cpp")
    found = fit(asked, 2048)
    whole = files.gguf().tensor_bytes
    assert whole == 96_576_768
    if tp == 1:
        assert found.weights_bytes == whole
        assert fit(msgspec.structs.replace(asked, weights="bf16"), 2048).weights_bytes > 2 * whole
    else:
        assert whole / tp <= found.weights_bytes < 1.05 * whole / tp
    d = resolve(asked)
    m = rank_model(d)
    assert m.dense_bytes == found.weights_bytes  # the tied table is read as the head


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("FP8 (E4M3)", "fp8_e4m3"),
        ("fp8 block", "fp8_block128"),
        ("W8A8-FP8", "fp8_e4m3"),
        ("int8 w8a8", "int8"),
        ("INT4 AWQ", "int4_g128_asym"),
        ("awq_marlin", "int4_g128_asym"),
        ("gptq_marlin", "int4_g128"),
        ("int4 g128", "int4_g128"),
        ("modelopt_fp4", "nvfp4"),
        ("bitsandbytes", "nf4"),
        ("Q4_K_M", "q4_k"),
    ],
)
def test_weight_formats_as_people_and_engines_write_them(written, stored):
    assert resolve(Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", weights=written)).weights == stored
