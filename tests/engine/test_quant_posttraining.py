"""Quantizing a model: folders that transformers loads, methods that lose less than rounding, runs that can be continued."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_models_logits import VOCAB, dense, reference, tiny_model
from torch_steps import Engine

from headrace.base.errors import CorruptCheckpoint, HeadraceError, InvalidInput
from headrace.engine.models import MODELS
from headrace.engine.quant import export, posttraining
from headrace.engine.quant.calibration import CalibrationText, LayerRun
from headrace.engine.quant.formats import form
from headrace.engine.quant.formats.integer_groups import IntegerGroups
from headrace.engine.quant.journal import NAME as JOURNAL
from headrace.engine.quant.journal import Journal
from headrace.engine.quant.methods import METHODS, awq, gptq
from headrace.engine.quant.methods._contract import Inputs, LayerWork, Settings
from headrace.engine.quant.originals import original
from headrace.engine.quant.posttraining import quantize
from headrace.engine.weights.open import open_weights
from headrace.engine.weights.safetensors import SafetensorsSource, checkpoint_paths
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

WIDTHS = {"hidden_size": 64, "intermediate_size": 128}


def text(length=64, samples=24, seed=0) -> CalibrationText:
    """Tokens that follow each other with a pattern, so that activations are correlated as in language."""
    rng = np.random.default_rng(seed)
    successor = rng.integers(3, VOCAB, VOCAB)
    tokens = [5]
    for _ in range(length * samples):
        tokens.append(int(successor[tokens[-1]]) if rng.random() < 0.7 else int(rng.integers(3, VOCAB)))
    return CalibrationText.of(tokens, samples, length)


def made(folder, out, weights="int4-g32", method="rtn", **how):
    return quantize(locate(str(folder)), weights, method, out, calibration=text(), **how)


def ours(folder, tokens, **how):
    engine = Engine.of(str(folder), threads=1, **how)
    try:
        s = engine.add(tokens, prompt_logprobs=VOCAB)
        engine.generate([s], 1)
        weights = engine.model.memory()[0]
        assert weights.predicted_bytes == weights.actual_bytes
        return dense(s.prompt_logprobs)
    finally:
        engine.close()


def theirs(folder, tokens):
    """transformers' log-probabilities. It dequantizes while loading: its packed layers of compressed-tensors 0.20 expect the
    zero points of asymmetric weights unpacked, which that library itself never writes."""
    config = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, attn_implementation="eager"
    ).eval()
    return reference(model, tokens).numpy()[:-1]


@pytest.mark.parametrize(
    ("weights", "method"),
    [
        ("int4-g32", "gptq"),
        ("int4-g32-asym", "awq"),
        ("int4-g64", "rtn"),
        ("int4", "rtn"),
        ("int8-g32", "rtn"),
        ("int8", "rtn"),
        ("fp8", "rtn"),
        ("fp8-channel", "awq"),
    ],
)
def test_transformers_loads_the_folder_and_computes_the_same(tmp_path, weights, method):
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS, num_hidden_layers=2)
    made(folder, tmp_path / "out", weights, method)
    tokens = list(range(3, 40))
    np.testing.assert_allclose(ours(tmp_path / "out", tokens), theirs(tmp_path / "out", tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["int4_g32", "int4_g64_asym", "int4", "int8", "int8_g32", "w8a8", "fp8_channel"])
def test_what_is_written_is_what_the_library_packs_bit_for_bit(name):
    """compressed-tensors itself unpacks the tensors to the same matrix, and packs that matrix to the same tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weight = torch.randn(48, 192, generator=torch.Generator().manual_seed(3))
    packed = form(name).quantize(weight)
    written = export.tensors(packed, torch.float32)
    config = export.quantization_config(form(name), [])
    (group,) = config["config_groups"].values()
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**group["weights"]), format=config["format"]
    )
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    values = compressor.decompress(dict(written), scheme)["weight"]
    torch.testing.assert_close(values, packed.dequantize(), rtol=2e-7, atol=0)
    state = {"weight": values, "weight_scale": written["weight_scale"]}
    if "weight_zero_point" in written:
        state["weight_zero_point"] = packed_zeros(packed)
    again = compressor.compress(state, scheme)
    for key, tensor in written.items():
        assert torch.equal(again[key].view(tensor.dtype), tensor), key


def packed_zeros(packed) -> torch.Tensor:
    """Zero points as that library takes them: [rows, groups], lowered by half the codes' range."""
    from headrace.engine.quant.formats._nibbles import unpack

    count = packed.tensors["scales"].numel()
    return unpack(packed.tensors["zeros"][None], count)[0].view(packed.rows, -1).to(torch.int8) - 8


def test_w8a8_is_written_with_activations_and_computed_alike(tmp_path):
    """Both round activations per token; the rounding of halves and of the scale's last bit is not the same."""
    model, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    made(folder, tmp_path / "out", "w8a8")
    tokens = list(range(3, 40))
    found, expected = ours(tmp_path / "out", tokens), theirs(tmp_path / "out", tokens)
    plain = reference(model, tokens).numpy()[:-1]
    assert np.abs(found - expected).mean() < np.abs(found - plain).mean() * 1.5
    assert np.abs(found - expected).max() < 0.5
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] is True


@pytest.mark.parametrize("case", ["qwen2", "gemma3", "phi3", "qwen3"])
def test_other_architectures(tmp_path, case):
    _, folder = tiny_model(tmp_path, case, **WIDTHS)
    made(folder, tmp_path / "out", "int4-g32-asym", "awq")
    tokens = list(range(3, 40))
    np.testing.assert_allclose(ours(tmp_path / "out", tokens), theirs(tmp_path / "out", tokens), atol=1e-4, rtol=0)


def test_a_bf16_model_keeps_scales_that_bf16_has(tmp_path):
    """Readers that hold scales in the model's type see the same numbers."""
    model, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    model.bfloat16().save_pretrained(folder)
    for weights in ("int4-g32-asym", "int8"):
        out = tmp_path / weights
        made(folder, out, weights)
        stored = load_file(out / "model-layer-00001.safetensors")
        assert stored["model.layers.1.mlp.up_proj.weight_scale"].dtype == torch.bfloat16
        source = open_weights(locate(str(out)), EngineConfig(model=str(out)))
        packed = source.packed("model.layers.1.mlp.up_proj.weight")
        assert not packed.rounded
        config = transformers.CompressedTensorsConfig(dequantize=True)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            out, quantization_config=config, dtype=torch.bfloat16
        )
        layer = loaded.model.layers[1].mlp.up_proj
        mine = torch.from_numpy(source.read("model.layers.1.mlp.up_proj.weight"))
        torch.testing.assert_close(layer.weight.float(), mine, rtol=2**-7, atol=0)


def test_experts_are_quantized_by_gptq_and_served(tmp_path):
    _, folder = tiny_model(tmp_path, "mixtral", **WIDTHS, num_hidden_layers=2)
    result = made(folder, tmp_path / "out", "int4-g32", "gptq")
    assert len(result.losses) == 2
    made(folder, tmp_path / "rtn", "int4-g32", "rtn")
    assert ours(tmp_path / "out", list(range(3, 40))).shape == (36, VOCAB)
    errors = [relative_output_error(folder, tmp_path / name, text(seed=1)) for name in ("out", "rtn")]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("weights", ["int4-g32-asym", "int8-g64-asym", "w8a8"])
def test_experts_in_formats_that_transformers_does_not_load_are_what_the_library_unpacks(tmp_path, weights):
    """transformers 5.24 hands the zero points of experts to nobody and takes only packed experts, so that it refuses these
    folders. compressed-tensors itself reads them: its values, in a plain folder, give transformers' logits."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    _, plain = tiny_model(tmp_path, "mixtral", **WIDTHS, num_hidden_layers=2)
    out = tmp_path / "out"
    made(plain, out, weights)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**group["weights"]), format=config["format"]
    )
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    stored = {k: v for path in checkpoint_paths(out) for k, v in load_file(path).items()}
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = tensor
    values = {}
    for module, parts in modules.items():
        found = compressor.decompress(parts, scheme)["weight"] if "weight_scale" in parts else parts["weight"]
        values[f"{module}.weight"] = found.contiguous()
    assert sum(".experts." in name for name in values) == 2 * 6 * 3
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager").eval()
    tokens = list(range(3, 40))
    expected = reference(model, tokens).numpy()[:-1]
    served = (
        {"weights": "fp32"} if weights == "w8a8" else {}
    )  # else activations are rounded too, and tokens routed elsewhere
    np.testing.assert_allclose(ours(out, tokens, **served), expected, atol=1e-4, rtol=0)


def kl(plain, found) -> float:
    return float((np.exp(plain) * (plain - found)).sum(-1).mean())


def test_calibrated_methods_lose_less_than_rounding(tmp_path):
    model, folder = tiny_model(tmp_path, "llama", **WIDTHS, num_key_value_heads=4)
    losses, kls = {}, {}
    fresh = [int(t) for t in text(length=120, samples=1, seed=0).tokens[0]]
    plain = reference(model, fresh).numpy()[:-1]
    for method in METHODS.names():
        out = tmp_path / method
        result = made(folder, out, "int4-g64", method)
        losses[method] = relative_output_error(folder, out, text(seed=1))
        kls[method] = kl(plain, ours(out, fresh))
        assert all(0 < loss < 0.05 for loss in result.losses)
    assert losses["gptq"] < losses["rtn"]
    assert losses["awq"] < losses["rtn"]
    assert kls["gptq"] < kls["rtn"]


def relative_output_error(folder, out, calibration) -> float:
    """Mean squared error of the last layer's hidden states over their mean square, on text that was not calibrated with."""
    plain, rounded = hidden_states(folder, calibration), hidden_states(out, calibration)
    return float((plain - rounded).square().mean() / plain.square().mean())


def hidden_states(folder, calibration) -> torch.Tensor:
    files = locate(str(folder))
    spec, names = files.spec(), MODELS.get(files.spec().model_type).hf
    source = open_weights(files, EngineConfig(model=str(folder)))
    table = torch.from_numpy(np.array(source.read(f"{names.embedding}.weight")))
    hidden = table[torch.from_numpy(calibration.tokens)] * spec.embedding_scale
    with torch.inference_mode():
        for i in range(spec.num_layers):
            tensors = {n: torch.from_numpy(np.array(source.read(n))) for n in source.names() if f"layers.{i}." in n}
            hidden = LayerRun(spec, names, i, tensors)(hidden)
    return hidden


@pytest.mark.parametrize(
    "case", ["llama", "llama-tied-biased", "mistral-window", "gemma2", "gemma3", "phi3", "qwen3", "mixtral"]
)
def test_layers_run_one_by_one_give_the_model(tmp_path, case):
    model, folder = tiny_model(tmp_path, case)
    calibration = text(length=40, samples=3)
    hidden = hidden_states(folder, calibration)
    with torch.inference_mode():
        expected = model.model(torch.from_numpy(calibration.tokens), output_hidden_states=True).last_hidden_state
        torch.testing.assert_close(model.model.norm(hidden), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama-mha", "llama-tied-biased", "gemma3", "qwen2", "phi3"])
def test_folding_scales_leaves_the_function_as_it_is(tmp_path, case, monkeypatch):
    _, folder = tiny_model(tmp_path, case, **WIDTHS)
    files = locate(str(folder))
    spec, names = files.spec(), MODELS.get(files.spec().model_type).hf
    source = SafetensorsSource(checkpoint_paths(folder))
    tensors = {n: torch.from_numpy(np.array(source.read(n))) for n in source.names() if "layers.1." in n}
    matrices = tuple(n for n, t in tensors.items() if t.dim() == 2)
    hidden = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(0))
    folded = []

    def random_scales(matrices, inputs, form, grid):
        folded.append(len(matrices))
        return (
            torch.rand(next(iter(matrices.values())).shape[1], generator=torch.Generator().manual_seed(len(folded)))
            + 0.5
        )

    monkeypatch.setattr(awq, "_search", random_scales)
    with torch.inference_mode():
        layer = LayerRun(spec, names, 1, tensors)
        work = LayerWork(1, names, dict(tensors), matrices, layer.record(), spec.norm_offset)
        before = layer(hidden)
        assert set(work.inputs) == set(matrices)
        awq.METHOD.quantize(work, form("int8"), Settings())
        after = LayerRun(spec, names, 1, work.tensors)(hidden)
    assert len(folded) == {"llama-mha": 4, "phi3": 2}.get(case, 3)
    assert any(not torch.equal(work.tensors[m], tensors[m]) for m in matrices)
    torch.testing.assert_close(after, before, atol=2e-5, rtol=1e-4)


def correlated(width, rows=500, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator) / width**0.5
    x = torch.randn(rows, width, generator=generator) @ mix + torch.randn(rows, 1, generator=generator)
    x[:, ::9] *= 6
    inputs = Inputs.empty(width)
    inputs.add(x)
    return x, inputs


@pytest.mark.parametrize("name", ["int4_g32", "int4_g32_asym", "int4_g128", "int4", "int8_g64"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_errs_less_than_rounding_on_correlated_inputs(name, act_order):
    x, inputs = correlated(160)
    weight = torch.randn(48, 160, generator=torch.Generator().manual_seed(1))
    f = form(name)
    assert isinstance(f, IntegerGroups)
    found = gptq.rounded(weight, inputs, f, Settings(act_order=act_order), "w").dequantize()
    plain = f.quantize(weight).dequantize()

    def error(w):
        return float(((w - weight) @ x.t()).square().sum())

    assert error(found) < 0.8 * error(plain)
    assert inputs.loss(found - weight) == pytest.approx(error(found), rel=1e-3)


def test_gptq_without_correlation_is_rounding():
    inputs = Inputs(torch.diag(torch.linspace(5, 1, 128)), torch.ones(128), 10)
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(2))
    f = form("int4_g32_asym")
    found = gptq.rounded(weight, inputs, f, Settings(damping=1e-9), "w")
    expected = f.quantize(weight)
    for key, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[key], tensor), key


def test_gptq_lets_unused_inputs_be_and_refuses_none():
    inputs = Inputs(torch.zeros(64, 64), torch.zeros(64), 0)
    found = gptq.rounded(torch.randn(8, 64), inputs, form("int4_g32"), Settings(), "w")
    assert not found.dequantize().any()


def interrupted(after):
    def report(progress):
        if progress.done == after:
            raise KeyboardInterrupt

    return report


@pytest.mark.parametrize(("method", "after"), [("rtn", 3), ("awq", 1), ("gptq", 1), ("gptq", 4)])
def test_a_run_that_was_ended_is_continued_to_the_same_files(tmp_path, method, after):
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    made(folder, tmp_path / "whole", method=method)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        made(folder, out, method=method, report=interrupted(after))
    assert not (out / "config.json").exists()
    seen = []
    made(folder, out, method=method, report=seen.append)
    assert [p.resumed for p in seen] == [i < after for i in range(4)]
    for path in (tmp_path / "whole").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in (tmp_path / "whole").iterdir())


def test_half_a_journal_line_and_half_a_file_are_written_again(tmp_path):
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        made(folder, out, report=interrupted(2))
    journal = (out / JOURNAL).read_bytes()
    (out / JOURNAL).write_bytes(journal[:-20])
    (out / "model-layer-00001.partial").write_bytes(b"half")
    seen = []
    made(folder, out, report=seen.append)
    assert [p.resumed for p in seen] == [True, False, False, False]
    assert ours(out, [3, 4, 5]).shape == (2, VOCAB)


@pytest.mark.parametrize("line", ["[]", "5", "{}", '{"part": "layer-00000"}', '{"part": 3, "tensors": []}', "\x00"])
@pytest.mark.parametrize("first", [True, False])
def test_a_journal_that_says_something_else_is_refused(tmp_path, line, first):
    settings = {"a": 1}
    Journal(tmp_path, settings).close()
    written = (tmp_path / JOURNAL).read_text()
    (tmp_path / JOURNAL).write_text(f"{line}\n" if first else f"{written}{line}\n")
    with pytest.raises(InvalidInput, match="damaged") as caught:
        Journal(tmp_path, settings)
    assert caught.value.field == "out"


def test_a_finished_file_that_was_changed_is_named(tmp_path):
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    out = tmp_path / "out"
    made(folder, out)
    (out / "model-layer-00002.safetensors").write_bytes(b"short")
    with pytest.raises(CorruptCheckpoint, match="layer-00002"):
        made(folder, out)


def test_other_settings_do_not_continue_a_run(tmp_path):
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    with pytest.raises(KeyboardInterrupt):
        made(folder, tmp_path / "out", report=interrupted(1))
    with pytest.raises(InvalidInput, match=r"another weights") as caught:
        made(folder, tmp_path / "out", "int8")
    assert caught.value.field == "out"


def test_a_folder_with_a_model_is_not_written_over(tmp_path):
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    with pytest.raises(InvalidInput, match="holds a model already"):
        made(folder, folder)
    assert (folder / "model.safetensors").exists()


def test_two_runs_do_not_share_a_folder(tmp_path):
    first = Journal(tmp_path / "out", {"a": 1})
    with pytest.raises(InvalidInput, match="another process"):
        Journal(tmp_path / "out", {"a": 1})
    first.close()
    Journal(tmp_path / "out", {"a": 1}).close()


def test_kept_modules_stay_and_the_folder_says_so(tmp_path):
    from headrace.engine.quant.policy import Policy

    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    policy = Policy(modules=("re:.*layers\\.0\\..*", "down_proj"))
    made(folder, tmp_path / "out", method="gptq", policy=policy)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.3.mlp.down_proj" in config["ignore"]
    stored = load_file(tmp_path / "out" / "model-layer-00000.safetensors")
    assert not any(name.endswith("packed") for name in stored)
    tokens = list(range(3, 40))
    np.testing.assert_allclose(ours(tmp_path / "out", tokens), theirs(tmp_path / "out", tokens), atol=1e-4, rtol=0)


REFUSED = {
    "groups-that-do-not-divide": (
        {"intermediate_size": 96},
        {"weights": "int4-g64"},
        r"down_proj.*96 inputs.*use int4_g32\)$",
    ),
    "groups-that-do-not-divide-asymmetric": (
        {"hidden_size": 192},
        {"weights": "int4-g128-asym"},
        r"192 inputs.*use int4_g64_asym or int4_g32_asym\)$",
    ),
    "no-groups-that-divide": (
        {"intermediate_size": 80},
        {"weights": "int8-g64"},
        r"80 inputs.*use a format with a scale per output\)$",
    ),
    "nowhere-to-write": ({}, {"weights": "nf4"}, r"nf4.*int4_g128"),
    "unknown-format": ({}, {"weights": "int3"}, "int3"),
    "unknown-method": ({}, {"method": "magic"}, r"magic.*awq.*gptq.*rtn"),
    "gptq-of-floats": ({}, {"weights": "fp8", "method": "gptq"}, "gptq"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_before_anything_is_written(tmp_path, case):
    changes, how, words = REFUSED[case]
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS | changes)
    with pytest.raises(InvalidInput, match=words):
        made(folder, tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()


def test_awq_of_experts_is_refused(tmp_path):
    _, folder = tiny_model(tmp_path, "mixtral", **WIDTHS)
    with pytest.raises(InvalidInput, match="experts"):
        made(folder, tmp_path / "out", method="awq")


def test_a_quantized_model_is_not_quantized_again(tmp_path):
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    made(folder, tmp_path / "out")
    with pytest.raises(InvalidInput, match="int4_g32"):
        made(tmp_path / "out", tmp_path / "again")


def test_calibrated_methods_need_text(tmp_path):
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    with pytest.raises(InvalidInput, match="text") as caught:
        quantize(locate(str(folder)), "int4-g32", "gptq", tmp_path / "out")
    assert caught.value.field == "calibrate"
    with pytest.raises(InvalidInput, match="64"):
        CalibrationText.of([1, 2, 3], 4, 64)


def test_nan_weights_are_named(tmp_path):
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(HeadraceError, match=r"layers\.2\.self_attn\.k_proj"):
        made(folder, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def spoilt(folder, change):
    """The folder with its tensors changed by `change`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


DOWN = "model.layers.1.mlp.down_proj.weight"
OTHER_WEIGHTS = {
    "missing": (lambda t: t.pop(DOWN), r"down_proj\.weight' is missing"),
    "short": (lambda t: t.update({DOWN: t[DOWN][:-1].contiguous()}), r"down_proj\.weight' has shape"),
    "norm missing": (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight' is missing"),
    "head missing": (lambda t: t.pop("lm_head.weight"), r"lm_head\.weight' is missing"),
    "one layer more": (lambda t: t.update({"model.layers.9.mlp.down_proj.weight": torch.zeros(4, 4)}), r"layers\.9"),
}


@pytest.mark.parametrize("case", OTHER_WEIGHTS)
def test_weights_that_the_config_does_not_describe_are_refused_before_anything_is_written(tmp_path, case):
    change, words = OTHER_WEIGHTS[case]
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    spoilt(folder, change)
    with pytest.raises(CorruptCheckpoint, match=words):
        made(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
@pytest.mark.parametrize("name", ["model.layers.1.input_layernorm.weight", DOWN, "model.norm.weight"])
def test_every_method_names_the_tensor_that_is_not_finite(tmp_path, method, name):
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    spoilt(folder, lambda tensors: tensors[name].view(-1)[:1].fill_(float("nan")))
    with pytest.raises(CorruptCheckpoint, match="NaN") as caught:
        made(folder, tmp_path / "out", method=method)
    assert caught.value.field == name


def test_awq_names_the_matrix_whose_scales_do_not_fit(tmp_path):
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    spoilt(folder, lambda tensors: tensors[DOWN].mul_(1e30))
    with pytest.raises(InvalidInput, match="scales are not finite") as caught:
        made(folder, tmp_path / "out", method="awq")
    assert caught.value.field == DOWN


@pytest.mark.parametrize("pattern", ["no.such", "re:(", "down_proj.weight"])
def test_a_pattern_that_keeps_nothing_is_refused(tmp_path, pattern, capsys):
    from headrace.cli.main import main

    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["quantize", str(folder), "--weights", "int8", "--out", str(tmp_path / "out"), "--keep", pattern])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert repr(pattern) in line
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    from headrace.cli.main import main

    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["quantize", str(folder), "--weights", "int8", "--out", str(tmp_path / "file" / "out")])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert str(tmp_path / "file") in line


def test_others_may_read_the_folder_as_the_umask_says(tmp_path):
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    before = os.umask(0o022)
    try:
        made(folder, tmp_path / "out")
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir() if path.is_file()} == {
        path.name: 0o644 for path in (tmp_path / "out").iterdir()
    }


def test_a_full_disk_is_said_and_the_run_can_be_continued(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    made(folder, tmp_path / "whole")
    written = []

    def full(tensors, path, **how):
        if written:
            raise SafetensorError("I/O error: No space left on device")
        written.append(path)
        save_file(tensors, path, **how)

    with monkeypatch.context() as m:
        m.setattr("safetensors.torch.save_file", full)
        with pytest.raises(HeadraceError, match=r"layer-00001.*No space left.*repeat the command"):
            made(folder, tmp_path / "out")
    made(folder, tmp_path / "out")
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def with_tokenizer(folder):
    """A tokenizer of bytes, so that the whole path from text works."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_the_verb_quantizes_continues_and_what_it_wrote_generates(tmp_path, capsys):
    from headrace.cli.main import main

    _, folder = tiny_model(tmp_path, "llama", **WIDTHS, vocab_size=256)
    with_tokenizer(folder)
    book = tmp_path / "book.txt"
    book.write_text("It was the best of times, it was the worst of times. " * 60)
    out = tmp_path / "out"
    arguments = ["quantize", str(folder), "--weights", "int4-g32", "--method", "gptq", "--calibrate", str(book)]
    arguments += ["--samples", "8", "--length", "32", "--threads", "1", "--out", str(out)]
    for state in ("relative loss", "finished before"):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert not ended.value.code
        shown = capsys.readouterr()
        assert shown.err.count(state) == 4
        assert str(out) in shown.out
    with suppress(SystemExit):  # generate may return instead
        main(["generate", str(out), "--prompt", "It was", "--max-tokens", "4", "--temperature", "0", "--json"])
    # Symmetric groups are blocks of the native backend, where that is built.
    expected = "torch" if find_spec("headrace_native") is None else "native"
    assert json.loads(capsys.readouterr().out)["backend"] == expected
    with pytest.raises(SystemExit) as ended:
        main([*arguments[:-1], str(tmp_path / "other"), "--weights", "nf4"])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("option", "value"),
    [("samples", 0), ("length", 0), ("grid", 0), ("damping", 0), ("threads", 0), ("threads", 100_000)],
)
def test_numbers_that_mean_nothing_are_refused_by_name(tmp_path, option, value, capsys):
    from headrace.cli.main import main

    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    capsys.readouterr()  # of saving the model
    with pytest.raises(SystemExit) as ended:
        main(["quantize", str(folder), "--weights", "int8", "--out", str(tmp_path / "out"), f"--{option}", str(value)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert option in line
    assert not (tmp_path / "out").exists()


def test_the_result_counts_bytes(tmp_path):
    _, folder = tiny_model(tmp_path, "llama", **WIDTHS)
    result = made(folder, tmp_path / "out", "int8")
    assert result.bytes_before == sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    assert result.bytes_after == sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))
    assert result.bytes_after < 0.5 * result.bytes_before
    assert isinstance(result, posttraining.Result)


@pytest.mark.model
def test_a_gguf_file_is_quantized_into_a_folder_that_transformers_and_we_load(tmp_path):
    """Rows in Hugging Face's order, a config that describes the file, tokenizer and template: the same tokens and nearly
    the distribution of the file itself."""
    from headrace import LLM
    from headrace.text.load import load_template, load_tokenizer

    files = locate("smollm2-135m")
    out = tmp_path / "out"
    result = quantize(files, "int8-g32", "rtn", out)
    assert len(result.losses) == 30
    written = locate(str(out))
    tokenizer, other = load_tokenizer(files), load_tokenizer(written)
    text = "It was the best of times, it was the worst of times: 1,234 naïve cafés."
    tokens = tokenizer.encode(text)
    assert other.encode(text) == tokens
    messages = [{"role": "user", "content": "Hello"}]
    assert load_template(written, other).render(messages) == load_template(files, tokenizer).render(messages)
    assert set(written.spec().eos_token_ids) >= set(files.spec().eos_token_ids)
    config = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, quantization_config=config, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model.eval()(torch.tensor([tokens])).logits[0].log_softmax(-1)
    picked = []
    plain = tmp_path / "plain"
    plain.mkdir()
    seen = original(files)
    save_file({name: seen.raw(name) for name in seen.names()}, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(seen.config))
    for name in ("smollm2-135m", str(out), str(plain)):
        engine = Engine.of(name, threads=1, max_model_len=128)
        s = engine.add(tokens, prompt_logprobs=1, logprobs=1, max_tokens=1)
        engine.generate([s], 1)
        picked.append(np.array([entry.logprob for entry in s.prompt_logprobs]))
        engine.close()
    taken = theirs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
    # transformers dequantizes into the folder's fp16, we into fp32.
    np.testing.assert_allclose(picked[1], taken, atol=2e-2, rtol=0)
    assert np.abs(picked[0] - picked[2]).max() < 0.02  # fp16 instead of the file's own values
    assert np.abs(picked[0] - picked[1]).mean() < 0.1
    with LLM(str(out), max_model_len=64, threads=1) as llm:
        assert llm.info.vocab_size == files.spec().vocab_size


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_config_written_for_a_gguf_file_says_what_the_file_does(tmp_path, architecture):
    """A tiny folder → its geometry as a GGUF header would have it → config → geometry."""
    from dataclasses import replace

    from msgspec import structs

    from headrace.engine.quant import originals
    from headrace.spec.hf import spec_from_hf

    _, folder = tiny_model(tmp_path, architecture, **WIDTHS)
    spec = locate(str(folder)).spec()
    written = spec_from_hf(originals._CONFIGS[spec.model_type](spec))
    originals._compare(spec, written)
    other = replace(spec, layers=(structs.replace(spec.layers[0], num_norms=3), *spec.layers[1:]))
    with pytest.raises(HeadraceError, match="layer 0"):
        originals._compare(other, written)
