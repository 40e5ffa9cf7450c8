"""FLOPs, activations and the bytes of precisions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_spec_parameters import CASES, config_of
from test_spec_reference import DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS_120B, MISTRAL

from headrace.base.errors import InvalidInput
from headrace.spec import accounting
from headrace.spec.accounting import Span
from headrace.spec.hf import spec_from_hf
from headrace.spec.precision import KV_PRECISIONS, PRECISIONS, kv_precision, precision
from headrace.spec.quantization import unquantized_parts


@given(
    start=st.integers(0, 200),
    length=st.integers(1, 200),
    window=st.one_of(st.none(), st.integers(1, 250)),
    chunked=st.booleans(),
)
def test_attended_tokens_equal_a_count_of_the_mask(start: int, length: int, window: int | None, chunked: bool) -> None:
    queries = np.arange(start, start + length)[:, None]
    keys = np.arange(start + length)[None]
    mask = keys <= queries
    if window is not None:
        mask &= (keys // window == queries // window) if chunked else keys > queries - window
    assert accounting.attended_tokens(start, length, window, chunked=chunked) == int(mask.sum())


@pytest.mark.parametrize("case", CASES)
def test_flops_do_not_depend_on_how_a_prompt_is_chunked(case: str) -> None:
    spec = spec_from_hf(config_of(case))
    whole = accounting.flops(spec, [Span(0, 100)])
    parts = accounting.flops(spec, [Span(0, 30, False), Span(30, 1, False), Span(31, 69)])
    assert parts.gemm == whole.gemm
    assert parts.mixing == pytest.approx(whole.mixing)
    assert parts.head == whole.head
    if any(c.kind == "latent" for c in accounting.layer_caches(spec, "bf16")):
        assert parts.attention >= whole.attention  # each chunk takes the cheaper form, and may expand old latents again
    else:
        assert parts.attention == whole.attention


def test_gemm_flops_are_two_per_active_weight_and_token() -> None:
    spec = spec_from_hf(MISTRAL)
    counted = accounting.parameters(spec).by_part
    step = accounting.flops(spec, [Span(0, 10), Span(500, 1), Span(7, 5, sample=False)])
    assert step.gemm == 2 * 16 * (counted["attention"] + counted["mlp"])
    assert step.head == 2 * 2 * counted["lm_head"]
    assert step.by_part["mlp"] == 2 * 16 * counted["mlp"]
    assert step.total == step.gemm + step.attention + step.head


def test_attention_flops_of_one_decode_token() -> None:
    spec = spec_from_hf(MISTRAL)
    assert accounting.flops(spec, [Span(4095, 1)]).attention == 32 * 2 * 32 * (128 + 128) * 4096


def test_a_window_bounds_attention_flops() -> None:
    v01 = spec_from_hf(MISTRAL | {"sliding_window": 4096})
    far = accounting.flops(v01, [Span(20_000, 1)]).attention
    assert far == accounting.flops(v01, [Span(4095, 1)]).attention
    assert far < accounting.flops(spec_from_hf(MISTRAL), [Span(20_000, 1)]).attention


def test_mla_decodes_against_latents_and_prefills_expanded() -> None:
    spec = spec_from_hf(DEEPSEEK_V2)
    decode = accounting.flops(spec, [Span(9_999, 1)]).attention
    assert decode == 60 * 2 * 128 * (2 * 512 + 64) * 10_000
    prefill = accounting.flops(spec, [Span(0, 1000)]).attention
    assert prefill == 60 * 2 * 128 * (128 + 64 + 128) * (1000 * 1001 // 2)


def test_sparse_attention_stops_growing_but_its_indexer_does_not() -> None:
    extra = {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    spec = spec_from_hf(DEEPSEEK_V2 | extra)
    growth = accounting.flops(spec, [Span(50_000, 1)]).attention - accounting.flops(spec, [Span(49_999, 1)]).attention
    assert growth == 60 * 2 * 64 * 128


def test_moe_compute_counts_chosen_experts_only() -> None:
    spec = spec_from_hf(GPT_OSS_120B)
    assert accounting.gemm_flops_per_token(spec)["experts"] == 36 * 2 * 4 * 3 * 2880 * 2880


def test_expected_experts_has_the_right_limits() -> None:
    assert accounting.expected_experts(128, 4, 1) == pytest.approx(4)
    assert accounting.expected_experts(8, 2, 0) == 0
    assert accounting.expected_experts(8, 2, 10_000) == pytest.approx(8)
    rng = np.random.default_rng(0)
    drawn = [len({int(e) for _ in range(5) for e in rng.choice(16, 3, replace=False)}) for _ in range(4000)]
    assert accounting.expected_experts(16, 3, 5) == pytest.approx(float(np.mean(drawn)), rel=0.02)


def test_activations_follow_the_tokens_of_a_step_and_not_the_requests() -> None:
    spec = spec_from_hf(MISTRAL)
    small = accounting.activation_bytes(spec, 2048, 8)
    assert small == 2048 * (2 * 4096 + 3 * 14336) * 2
    assert accounting.activation_bytes(spec, 2048, 256) == small
    assert accounting.activation_bytes(spec, 8192, 8) == 4 * small
    # With very many rows the logits are the peak.
    assert accounting.activation_bytes(spec, 2048, 2048) == 2048 * 4096 * 2 + 2048 * 32000 * 4


@pytest.mark.parametrize("name", PRECISIONS)
def test_bytes_of_a_precision_are_those_of_arrays_that_hold_it(name: str) -> None:
    """Payload, scales and zero points counted one by one for a shape that no group divides unless it must."""
    p = precision(name)
    rows, cols = (6, 512) if p.scaling == "block" else (130, 300)
    payload = rows * ((cols * p.bits + 7) // 8) if p.scaling != "flat" else (rows * cols * p.bits + 7) // 8
    scales = {
        "none": 0,
        "block": 0,
        "tensor": 1,
        "row": rows,
        "group": rows * -(-cols // p.group_size) if p.group_size else 0,
        "tile": 2 * 3,
        "flat": -(-rows * cols // 64),
    }[p.scaling]
    expected = payload + scales * p.scale_bytes + -(-scales * p.zero_bits // 8) + p.tensor_bytes + cols * p.column_bytes
    if p.scale_group:
        expected += -(-scales // p.scale_group) * 4
    assert p.nbytes((rows, cols)) == expected
    assert p.nbytes((2, rows // 2, cols)) == p.nbytes((rows, cols))


def test_ggml_bytes_equal_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    from headrace.spec.ggml import GGML_TYPES

    theirs = {int(k): v for k, v in gguf.constants.GGML_QUANT_SIZES.items()}
    for code, kind in GGML_TYPES.items():
        if code in theirs:
            assert theirs[code] == (kind.block_elements, kind.block_bytes), kind.name
    assert set(GGML_TYPES) <= set(theirs) | {39, 40}


def test_ggml_blocks_must_divide_rows() -> None:
    with pytest.raises(InvalidInput, match="multiple of 32"):
        precision("q4_0").nbytes((4, 33))


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("BF16", "bf16"), ("torch.float16", "fp16"), ("float32", "fp32"), ("FP8", "fp8_e4m3"), ("int4-g64", "int4_g64"),
        ("w8a8", "int8"), ("AWQ", "int4_g128_asym"), ("nf4", "nf4"), ("Q4_K", "q4_k"), (" mxfp4 ", "mxfp4"),
    ],
)  # fmt: skip
def test_names_that_users_type(typed: str, found: str) -> None:
    assert precision(typed).name == found


def test_an_unknown_precision_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="int4_g128"):
        precision("int3")
    with pytest.raises(InvalidInput, match="int8"):
        kv_precision("mxfp4")
    assert kv_precision("fp8_e4m3").name == "fp8"
    own = [KV_PRECISIONS[name].vector_bytes(64) for name in ("fp32", "fp16", "bf16", "fp8", "int8", "int4")]
    assert own == [256, 128, 128, 64, 66, 36]


def test_unquantized_parts_of_a_layer_stay_at_16_bit() -> None:
    spec = spec_from_hf(DEEPSEEK_V3)
    everything = accounting.weight_bytes(spec, "int8", unquantized_parts=())
    kept = accounting.weight_bytes(spec, "int8", unquantized_parts=("attention@0",))
    one_layer = sum(
        w.elements - 4 * w.shape[0]
        for w in accounting.weights(spec)
        if w.layer == 0 and w.part == "attention" and w.linear
    )
    assert kept.total - everything.total == one_layer


def test_module_patterns_become_parts() -> None:
    spec = spec_from_hf(MISTRAL)
    every_gate = [f"model.layers.{i}.mlp.gate" for i in range(32)]
    assert unquantized_parts(["lm_head", *every_gate, "model.layers.3.self_attn.q_proj", "visual.blocks.0"], spec) == (
        "attention@3",
        "lm_head",
        "router",
    )
    assert unquantized_parts(["re:.*self_attn.*", "re:.*lm_head"], spec) == ("attention", "lm_head")
