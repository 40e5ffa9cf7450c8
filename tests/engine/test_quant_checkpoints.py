"""Quantized checkpoints in the layouts of their own libraries: read exactly, served as transformers computes the same
values, accounted to the byte; and what is wrong with one is an error that names the tensor."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from quantized_checkpoints import KINDS, quantize_folder
from safetensors.torch import save_file
from test_models_logits import TOLERANCE, VOCAB, dense, random_schedule, reference, tiny_model
from torch_steps import Engine

from headrace.base.errors import CorruptCheckpoint, HeadraceError, InvalidInput, UnsupportedModel
from headrace.engine.executors.native import BACKEND as NATIVE
from headrace.engine.executors.torch import BACKEND as TORCH
from headrace.engine.launch import choose_backend, launch
from headrace.engine.quant.formats import form
from headrace.engine.weights.dequantize import dequantize
from headrace.engine.weights.open import open_weights
from headrace.engine.weights.quantized import QuantizedSource
from headrace.spec.accounting import weight_bytes
from headrace.spec.config import EngineConfig
from headrace.spec.ggml import GGML_TYPES_BY_NAME
from headrace.spec.locate import locate

WIDTHS = {"hidden_size": 64, "intermediate_size": 128}
SMALL = {**WIDTHS, "num_hidden_layers": 2}
"""Two layers hold every kind of matrix; gemma3's own seven have both of its attentions."""
NAME = "model.layers.1.mlp.down_proj"


def quantized(tmp_path, kind, case="llama", **how):
    """The model with the checkpoint's values, and its folder."""
    model, folder = tiny_model(tmp_path, case, **(WIDTHS if case == "gemma3" else SMALL))
    values = quantize_folder(folder, kind, **how)
    model.load_state_dict(values, strict=False)
    return model, folder, values


def source_of(folder):
    files = locate(str(folder))
    return open_weights(files, EngineConfig(model=str(folder)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_is_read_as_its_library_reads_it(tmp_path, kind):
    _, folder, values = quantized(tmp_path, kind)
    source = source_of(folder)
    assert isinstance(source, QuantizedSource)
    assert set(source.names()) == set(values)
    for name, expected in values.items():
        assert source.shape(name) == tuple(expected.shape)
        # The same fp32 products; one more or less rounding of a scale where a library multiplies in another order.
        np.testing.assert_allclose(source.read(name), expected.numpy(), rtol=3e-7, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_served_checkpoint_gives_the_distributions_of_its_values(tmp_path, kind):
    model, folder, _ = quantized(tmp_path, kind)
    engine = Engine.of(str(folder), threads=1)
    try:
        rng = random.Random(kind)
        sequences = [
            engine.add([rng.randrange(VOCAB) for _ in range(n)], prompt_logprobs=VOCAB, logprobs=VOCAB)
            for n in (1, 9, 33)
        ]
        random_schedule(engine, sequences, rng, new_tokens=6)
        tolerance = 0.35 if kind == "ct-w8a8" else TOLERANCE
        for s in sequences:
            expected = reference(model, s.tokens).numpy()
            np.testing.assert_allclose(dense(s.prompt_logprobs + s.logprobs), expected[:-1], atol=tolerance, rtol=0)
        (weights,) = [item for item in engine.model.memory() if item.name == "weights"]
        assert weights.predicted_bytes == weights.actual_bytes
        spec = engine.model.spec
        counted = weight_bytes(spec, unquantized_precision="fp32").total
        assert weights.actual_bytes == counted
        assert any("the rest fp32" in note for note in engine.model.notes())
    finally:
        engine.close()


@pytest.mark.parametrize("case", ["phi3", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("kind", ["awq", "gptq-act-asym", "ct-int4-asym", "ct-fp8-channel"])
def test_architectures_with_fused_and_reordered_projections(tmp_path, case, kind):
    model, folder, _ = quantized(tmp_path, kind, case)
    engine = Engine.of(str(folder), threads=1)
    try:
        s = engine.add(list(range(3, 40)), prompt_logprobs=VOCAB)
        engine.generate([s], 1)
        expected = reference(model, s.prompt).numpy()
        np.testing.assert_allclose(dense(s.prompt_logprobs), expected[:-1], atol=TOLERANCE, rtol=0)
        (weights,) = engine.model.memory()[:1]
        assert weights.predicted_bytes == weights.actual_bytes
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["awq", "ct-int4", "bnb-nf4"])
def test_experts_stored_one_by_one(tmp_path, kind):
    """The quantized checkpoint against the same values in a plain one, both in our engine."""
    _, plain = tiny_model(tmp_path / "plain", "mixtral", **SMALL)
    _, folder = tiny_model(tmp_path / "quantized", "mixtral", **SMALL)
    more = {"modules_to_not_convert": ["gate"]} if kind == "awq" else {}
    values = quantize_folder(folder, kind, config=more)
    assert sum(".experts." in name for name in values) == 2 * 6 * 3
    save_file({k: v.contiguous() for k, v in values.items()}, plain / "model.safetensors")
    found = []
    for path in (plain, folder):
        engine = Engine.of(str(path), threads=1)
        s = engine.add(list(range(3, 40)), prompt_logprobs=VOCAB)
        engine.generate([s], 1)
        found.append(dense(s.prompt_logprobs))
        weights = engine.model.memory()[0]
        assert weights.predicted_bytes == weights.actual_bytes
        engine.close()
    np.testing.assert_allclose(*found, atol=TOLERANCE, rtol=0)


AT_LOAD = ["int8", "w8a8", "int4-g32", "int4-g64-asym", "nf4", "fp8", "fp8-block128", "mxfp4"]


@pytest.mark.parametrize(
    ("case", "name"),
    [(case, name) for case in ("llama", "phi3", "mixtral") for name in AT_LOAD] + [("qwen3_moe", "int4-g32")],
)
def test_quantizing_at_load_is_serving_the_rounded_values(tmp_path, case, name):
    """Engine with `weights=name` against transformers with every projection and expert replaced by its round trip."""
    model, folder = tiny_model(tmp_path, case, num_hidden_layers=2)
    engine = Engine.of(str(folder), weights=name, threads=1)
    try:
        s = engine.add(list(range(3, 40)), prompt_logprobs=VOCAB)
        engine.generate([s], 1)
        round_trip(model, name)
        expected = reference(model, s.prompt).numpy()
        tolerance = 1.0 if name == "w8a8" else 1e-3
        np.testing.assert_allclose(dense(s.prompt_logprobs), expected[:-1], atol=tolerance, rtol=0)
        (weights,) = engine.model.memory()[:1]
        assert weights.predicted_bytes == weights.actual_bytes
        assert weights.actual_bytes == weight_bytes(engine.model.spec, name, unquantized_precision="fp32").total
    finally:
        engine.close()


def round_trip(model, name) -> None:
    """Round what a quantizer takes: rows of fused projections are quantized apart, experts one by one."""
    config = model.config
    for key, parameter in model.named_parameters():
        if parameter.dim() < 2 or "embed" in key or "lm_head" in key or "norm" in key or "gate.weight" in key:
            continue
        with torch.no_grad():
            for matrix in parameter if parameter.dim() == 3 else [parameter]:
                sizes = [len(matrix)]
                if "qkv_proj" in key:
                    width = config.head_dim * config.num_key_value_heads
                    sizes = [config.head_dim * config.num_attention_heads, width, width]
                elif "gate_up_proj" in key:
                    sizes = [len(matrix) // 2] * 2
                for part in matrix.split(sizes):
                    part.copy_(form(name).quantize(part).dequantize())


def test_modules_left_alone_stay_plain_and_are_accounted(tmp_path):
    """A part of a layer half quantized: no part of the accounting can say it, so matrices are counted one by one."""
    skip = ("model.layers.1.mlp.up_proj", "model.layers.0.self_attn.o_proj")
    model, folder, _ = quantized(
        tmp_path, "ct-int4", skip=skip, config={"ignore": ["lm_head", skip[0], "re:.*layers\\.0.*o_proj$"]}
    )
    engine = Engine.of(str(folder), threads=1)
    try:
        s = engine.add(list(range(3, 40)), prompt_logprobs=VOCAB)
        engine.generate([s], 1)
        np.testing.assert_allclose(dense(s.prompt_logprobs), reference(model, s.prompt)[:-1], atol=TOLERANCE, rtol=0)
        (weights,) = engine.model.memory()[:1]
        assert weights.predicted_bytes == weights.actual_bytes
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gptq", {"lm_head": True, "modules_to_not_convert": []}),
        ("awq", {"modules_to_not_convert": []}),
        ("ct-int4", {"ignore": []}),
        ("fp8-block", {"modules_to_not_convert": []}),
        ("bnb-nf4", {"llm_int8_skip_modules": []}),
    ],
)
def test_a_checkpoint_may_quantize_its_head_too(tmp_path, kind, config):
    model, folder = tiny_model(tmp_path, "llama", **SMALL)
    head = KINDS[kind].pack(model.lm_head.weight.detach().float())

    def pack_head(tensors):
        del tensors["lm_head.weight"]
        tensors.update({f"lm_head.{part}": tensor for part, tensor in head.tensors.items()})

    values = quantize_folder(folder, kind, change=pack_head, config=config)
    model.load_state_dict(values | {"lm_head.weight": head.values}, strict=False)
    engine = Engine.of(str(folder), threads=1)
    try:
        s = engine.add(list(range(3, 40)), prompt_logprobs=VOCAB)
        engine.generate([s], 1)
        np.testing.assert_allclose(dense(s.prompt_logprobs), reference(model, s.prompt)[:-1], atol=TOLERANCE, rtol=0)
        (weights,) = engine.model.memory()[:1]
        assert weights.predicted_bytes == weights.actual_bytes
    finally:
        engine.close()


def test_a_quantized_checkpoint_is_dequantized_on_demand(tmp_path):
    model, folder, _ = quantized(tmp_path, "gptq-act-asym")
    engine = Engine.of(str(folder), weights="fp32", threads=1)
    try:
        s = engine.add(list(range(3, 40)), prompt_logprobs=VOCAB)
        engine.generate([s], 1)
        np.testing.assert_allclose(dense(s.prompt_logprobs), reference(model, s.prompt)[:-1], atol=TOLERANCE, rtol=0)
        assert engine.model.memory()[0].actual_bytes == weight_bytes(engine.model.spec, "fp32").total
    finally:
        engine.close()


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path):
    _, folder, _ = quantized(tmp_path, "awq")
    with pytest.raises(InvalidInput, match=r"int4_g32_asym.*nf4"):
        Engine.of(str(folder), weights="nf4")


def test_dummy_weights_take_the_format_that_the_config_names(tmp_path):
    _, folder, _ = quantized(tmp_path, "awq")
    engine = Engine.of(str(folder), load_format="dummy", threads=1)
    try:
        weights = engine.model.memory()[0]
        assert engine.model.weights_precision == "int4_g32_asym"
        assert weights.predicted_bytes == weights.actual_bytes
    finally:
        engine.close()


def test_mxfp4_stacks_are_read_as_gpt_oss_has_them(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 40, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 40, 2), generator=generator, dtype=torch.uint8)
    stem = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({f"{stem}_blocks": blocks, f"{stem}_scales": scales}, tmp_path / "model.safetensors")
    source = mxfp4_source(tmp_path)
    assert source.shape(stem) == (3, 40, 64)
    packed = form("mxfp4").adopt(source.packed(stem), stem)
    assert packed.nbytes == form("mxfp4").spec.nbytes((3, 40, 64)) == blocks.numel() + scales.numel()
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(packed.dequantize().transpose(1, 2), theirs)
    x = torch.randn(5, 64, generator=generator)
    expert = form("mxfp4").split(form_of_rows(packed), (40, 40, 40), stem)[1]
    torch.testing.assert_close(form("mxfp4").linear(x, expert), x @ theirs[1])


def form_of_rows(packed):
    from headrace.engine.quant.formats import Packed

    return Packed(packed.form, (packed.rows, packed.shape[-1]), packed.tensors)


def mxfp4_source(folder):
    from headrace.engine.weights.safetensors import SafetensorsSource, checkpoint_paths

    return QuantizedSource(SafetensorsSource(checkpoint_paths(folder)), {"quant_method": "mxfp4"}, "mxfp4")


def test_mxfp4_with_a_lost_scale_names_it(tmp_path):
    stem = "model.layers.0.mlp.experts.down_proj"
    save_file({f"{stem}_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with pytest.raises(CorruptCheckpoint, match=f"{stem}_scales"):
        mxfp4_source(tmp_path).packed(stem)


def poison(part, value):
    def change(tensors):
        tensor = tensors[f"{NAME}.{part}"]
        tensor.view(-1)[3] = value

    return change


def drop(part):
    return lambda tensors: tensors.pop(f"{NAME}.{part}")


def cut(part):
    def change(tensors):
        tensors[f"{NAME}.{part}"] = tensors[f"{NAME}.{part}"][:-1].clone()

    return change


def replaced(part, make):
    def change(tensors):
        tensors[f"{NAME}.{part}"] = make(tensors[f"{NAME}.{part}"])

    return change


DAMAGE = {
    "awq-nan-scale": ("awq", poison("scales", float("nan")), None, "scales"),
    "awq-no-zeros": ("awq", drop("qzeros"), None, "qzeros"),
    "awq-no-scales": ("awq", drop("scales"), None, "scales"),
    "awq-cut-zeros": ("awq", cut("qzeros"), None, "qzeros"),
    "awq-one-scale": ("awq", replaced("scales", lambda t: t[0, 0].clone()), None, "scales"),
    "awq-float-codes": ("awq", replaced("qweight", lambda t: t.float()), None, "qweight"),
    "awq-other-group": ("awq", None, {"group_size": 128}, "scales"),
    "gptq-no-zeros": ("gptq-asym", drop("qzeros"), None, "qzeros"),
    "gptq-cut-scales": ("gptq", cut("scales"), None, "expected [3, 8]"),
    "gptq-nan-scale-8bit": ("gptq-8bit", poison("scales", float("nan")), None, "scales"),
    "gptq-infinite-scale": ("gptq", poison("scales", float("inf")), None, "scales"),
    "gptq-says-symmetric": ("gptq-asym", None, {"sym": True}, "qzeros"),
    "gptq-order-unsaid": ("gptq-act", None, {"desc_act": False}, "g_idx"),
    "gptq-cut-order": ("gptq-act", cut("g_idx"), None, "g_idx"),
    "gptq-cut-order-of-none": ("gptq", cut("g_idx"), None, "g_idx"),
    "gptq-one-scale": ("gptq", replaced("scales", lambda t: t[0, 0].clone()), None, "scales"),
    "gptq-no-order": ("gptq-act", drop("g_idx"), None, "g_idx"),
    "gptq-broken-order": ("gptq-act", poison("g_idx", 77), None, "g_idx"),
    "gptq-other-group": ("gptq", None, {"group_size": 64}, "weight"),
    "ct-nan-scale": ("ct-int4", poison("weight_scale", float("nan")), None, "weight_scale"),
    "ct-no-scale": ("ct-int4", drop("weight_scale"), None, "weight_scale"),
    "ct-cut-zeros": ("ct-int4-asym", cut("weight_zero_point"), None, "weight_zero_point"),
    "ct-one-zero": ("ct-int4-asym", replaced("weight_zero_point", lambda t: t[0, 0].clone()), None, "zero_point"),
    "ct-cut-codes": ("ct-int4", cut("weight_packed"), None, "weight_packed"),
    "ct-int8-nan-scale": ("ct-int8", poison("weight_scale", float("nan")), None, "weight_scale"),
    "ct-w8a8-no-scale": ("ct-w8a8", drop("weight_scale"), None, "weight_scale"),
    "ct-fp8-infinite-scale": ("ct-fp8-channel", poison("weight_scale", float("inf")), None, "weight_scale"),
    "ct-no-zeros": ("ct-int4-asym", drop("weight_zero_point"), None, "weight_zero_point"),
    "ct-wrong-shape": ("ct-int4", replaced("weight_shape", lambda t: t * 2), None, "shape"),
    "ct-fp8-nan": ("ct-fp8-channel", replaced("weight", lambda t: torch.full_like(t, float("nan"))), None, "weight"),
    "ct-packed-and-plain": (
        "ct-int4",
        lambda t: t.update({f"{NAME}.weight": torch.ones(64, 128)}),
        None,
        "is there twice",
    ),
    "bnb-nan-absmax": ("bnb-nf4-single", poison("weight.absmax", float("nan")), None, "absmax"),
    "bnb-nan-nested": ("bnb-nf4", replaced("weight.nested_absmax", lambda t: t * float("nan")), None, "nested_absmax"),
    "bnb-other-table": ("bnb-nf4", poison("weight.quant_map", 0.5), None, "quant_map"),
    "bnb-no-state": ("bnb-nf4", drop("weight.quant_state.bitsandbytes__nf4"), None, "quant_state"),
    "bnb-int8-no-scale": ("bnb-int8", drop("SCB"), None, "SCB"),
    "bnb-int8-nan-scale": ("bnb-int8", poison("SCB", float("nan")), None, "SCB"),
    "fbgemm-no-scale": ("fbgemm-fp8", drop("weight_scale"), None, "weight_scale"),
    "fp8-no-scale": ("fp8-block", drop("weight_scale_inv"), None, "weight_scale_inv"),
    "fp8-nan-scale": ("fp8-block", replaced("weight_scale_inv", lambda t: t * float("nan")), None, "inv"),
    "fp8-cut-scale": ("fp8-block", cut("weight_scale_inv"), None, "weight_scale_inv"),
    "plain-inside": (
        "awq",
        lambda t: (
            drop("qweight")(t),
            drop("qzeros")(t),
            drop("scales")(t),
            t.update({f"{NAME}.weight": torch.ones(64, 128)}),
        ),
        None,
        "weight",
    ),
    "quantized-though-ignored": ("awq", None, {"modules_to_not_convert": ["model.layers.1"]}, "layers.1"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_an_error_that_names_the_tensor(tmp_path, case):
    kind, change, config, part = DAMAGE[case]
    _, folder = tiny_model(tmp_path, "llama", **SMALL)
    quantize_folder(folder, kind, change=change, config=config)
    with pytest.raises(CorruptCheckpoint) as caught:
        Engine.of(str(folder))
    assert "model.layers." in caught.value.field
    assert part in str(caught.value)
    if config is None:
        assert NAME in str(caught.value)


REFUSED = {
    "odd-group": ("gptq", {"group_size": 48}, "48"),
    "odd-group-awq": ("awq", {"group_size": 40}, "40"),
    "odd-group-ct": (
        "ct-int4",
        {
            "config_groups": {
                "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 24}},
            }
        },
        "24",
    ),
    "group-is-a-word": ("gptq", {"group_size": "large"}, "group_size"),
    "no-groups-at-all": ("ct-int4", {"config_groups": {}}, "config_groups"),
    "a-group-is-no-object": ("ct-int4", {"config_groups": {"a": True}}, "a must be an object"),
    "a-group-of-another-method": ("awq", {"config_groups": {"a": []}}, "a must be an object"),
    "three-bits": ("gptq", {"bits": 3}, "3-bit"),
    "other-awq-kernel": ("awq", {"version": "gemv"}, "gemv"),
    "no-method": ("awq", {"quant_method": None}, "quant_method"),
    "unknown-method": ("awq", {"quant_method": "quip"}, "quip"),
    "other-settings-per-module": ("gptq", {"dynamic": {"-:.*down": {}}}, "dynamic"),
    "another-fp4": ("bnb-nf4", {"bnb_4bit_quant_type": "fp4"}, "fp4"),
    "other-tiles": ("fp8-block", {"weight_block_size": [64, 64]}, "64"),
    "mixed-groups": (
        "ct-int4",
        {
            "config_groups": {
                "a": {"targets": ["re:.*attn.*"], "weights": {"num_bits": 8, "strategy": "channel"}},
                "b": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}},
            }
        },
        "mixed",
    ),
    "another-type": (
        "ct-int4",
        {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "posit"}}}},
        "posit",
    ),
    "another-strategy": (
        "ct-int4",
        {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "block"}}}},
        "block",
    ),
    "zeros-packed-away": ("ct-int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "rotated-inputs": ("ct-int4", {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform"),
    "ignored-by-half-an-expression": ("ct-int4", {"ignore": ["re:("]}, "regular expression"),
    "other-method": ("awq", {"quant_method": "fp8"}, "no tensor is stored so"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_cannot_be_served_is_refused(tmp_path, case):
    kind, config, word = REFUSED[case]
    _, folder = tiny_model(tmp_path, "llama", **SMALL)
    quantize_folder(folder, kind, config=config)
    with pytest.raises(HeadraceError, match=word):
        load(folder)


def test_what_a_checkpoint_asks_of_the_cache_is_said_and_its_scales_are_left(tmp_path):
    """`kv_cache_scheme` with its scales, as calibrated FP8 checkpoints have; dense `sparsity_config` changes nothing."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    model, folder = tiny_model(tmp_path, "llama", **SMALL)
    values = quantize_folder(
        folder,
        "ct-int4",
        change=lambda t: t.update(
            {f"model.layers.{i}.self_attn.{side}_scale": torch.tensor(0.5) for i in (0, 1) for side in "kv"}
        ),
        config={"kv_cache_scheme": scheme, "sparsity_config": {"format": "dense", "global_sparsity": 0.1}},
    )
    model.load_state_dict(values, strict=False)
    engine = Engine.of(str(folder), threads=1)
    try:
        s = engine.add(list(range(3, 40)), prompt_logprobs=VOCAB)
        engine.generate([s], 1)
        np.testing.assert_allclose(dense(s.prompt_logprobs), reference(model, s.prompt)[:-1], atol=TOLERANCE, rtol=0)
    finally:
        engine.close()
    for kv, said in (("auto", "--kv fp8 makes them so"), ("fp8", "so they are, without its scales")):
        core = launch(EngineConfig(model=str(folder), kv=kv, backend="torch", kv_bytes=2**20, max_model_len=64))
        core.executor.close()
        assert any("kv_cache_scheme" in note and said in note for note in core.info.notes)


def load(folder):
    files, options = locate(str(folder)), EngineConfig(model=str(folder))
    if (reason := TORCH.unavailable(files, options)) is not None:
        raise UnsupportedModel(reason)
    return TORCH.load(files, options)


def test_the_torch_backend_takes_over_and_says_why(tmp_path):
    _, folder, _ = quantized(tmp_path, "awq")
    files, config = locate(str(folder)), EngineConfig(model=str(folder))
    assert "int4_g32_asym" in NATIVE.unavailable(files, config)
    backend, notes = choose_backend(config, files)
    assert backend.name == "torch"
    assert any("native passed over" in note and "int4_g32_asym" in note for note in notes)
    with pytest.raises(UnsupportedModel, match="int4_g32_asym"):
        choose_backend(EngineConfig(model=str(folder), backend="native"), files)


@pytest.mark.parametrize("kind", ["gptq", "ct-int4", "gptq-8bit"])
def test_symmetric_groups_are_ggml_blocks_without_loss(tmp_path, kind):
    _, folder, values = quantized(tmp_path, kind)
    source = source_of(folder)
    for name in values:
        stored = source.stored(name)
        if not source.is_packed(name):
            continue
        assert stored.kind == ("q8_0" if kind == "gptq-8bit" else "q4_0")
        out = np.empty((stored.rows, stored.columns), np.float32)
        dequantize(np.ascontiguousarray(stored.data).reshape(-1), GGML_TYPES_BY_NAME[stored.kind], out)
        np.testing.assert_array_equal(out, source.read(name))


@pytest.mark.parametrize("factor", [-1.0, 0.0])
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("gptq", "scales"), ("gptq-8bit", "scales"), ("awq", "scales"), ("ct-int4", "weight_scale"), ("ct-int4-asym", "weight_scale"),
        ("ct-int8", "weight_scale"), ("ct-fp8-channel", "weight_scale"), ("fp8-block", "weight_scale_inv"),
        ("bnb-nf4-single", "weight.absmax"), ("bnb-int8", "SCB"),
    ],
)  # fmt: skip
def test_negative_scales_and_zero_are_taken_as_they_are(tmp_path, kind, part, factor):
    """Some quantizers write them: the code with one value more then is the positive one; rows of zeros have none."""
    _, folder, values = quantized(tmp_path, kind, change=replaced(part, lambda t: t * factor))
    source = source_of(folder)
    name = f"{NAME}.weight"
    found = source.read(name)
    np.testing.assert_allclose(found, factor * values[name].numpy(), rtol=3e-7, atol=1e-8)
    stored = source.stored(name)
    if stored.kind != "f32":
        out = np.empty((stored.rows, stored.columns), np.float32)
        dequantize(np.ascontiguousarray(stored.data).reshape(-1), GGML_TYPES_BY_NAME[stored.kind], out)
        np.testing.assert_array_equal(out, found)


@pytest.mark.parametrize("case", ["llama", "phi3", "gemma3"])
@pytest.mark.parametrize("kind", ["gptq", "ct-int4", "gptq-8bit"])
def test_native_serves_symmetric_groups_as_they_are(tmp_path, kind, case):
    pytest.importorskip("headrace_native")
    model, folder, _ = quantized(tmp_path, kind, case)
    files = locate(str(folder))
    config = EngineConfig(model=str(folder), threads=1, kv="fp32", options=(("activations", "fp32"),))
    assert NATIVE.unavailable(files, config) is None
    engine = Engine(NATIVE.load(files, config), block_tokens=16)
    try:
        s = engine.add(list(range(3, 40)), prompt_logprobs=VOCAB)
        engine.generate([s], 1)
        np.testing.assert_allclose(dense(s.prompt_logprobs), reference(model, s.prompt)[:-1], atol=2e-3, rtol=0)
        (weights,) = engine.model.memory()[:1]
        assert weights.predicted_bytes == weights.actual_bytes
    finally:
        engine.close()


def test_weights_that_native_has_not_are_left_to_torch(tmp_path):
    _, folder = tiny_model(tmp_path, "llama")
    files, config = locate(str(folder)), EngineConfig(model=str(folder), weights="int4-g128")
    backend, notes = choose_backend(config, files)
    assert backend.name == "torch"
    assert any("int4-g128" in note for note in notes)


def test_an_unknown_format_lists_the_known(tmp_path):
    _, folder = tiny_model(tmp_path, "llama")
    with pytest.raises(InvalidInput, match=r"int3.*fp32.*mxfp4") as caught:
        Engine.of(str(folder), weights="int3")
    assert caught.value.field == "weights"


def test_a_nan_weight_is_named_when_it_is_quantized(tmp_path):
    from safetensors.torch import load_file

    _, folder = tiny_model(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{NAME}.weight"][1, 1] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CorruptCheckpoint, match=f"{NAME}.*NaN"):
        Engine.of(str(folder), weights="int8")
