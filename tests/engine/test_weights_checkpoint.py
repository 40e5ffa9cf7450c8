"""Sources read what was written, and every kind of damage is an error that names the tensor."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize
from safetensors.torch import load_file, save_file
from test_models_logits import tiny_model
from torch_steps import Engine

from headrace.base.errors import CorruptCheckpoint, UnsupportedModel
from headrace.engine.weights.checkpoint import Checkpoint
from headrace.engine.weights.dummy import DummySource
from headrace.engine.weights.gguf import GGUFSource
from headrace.engine.weights.safetensors import SafetensorsSource, checkpoint_paths
from headrace.spec.gguf import read_gguf


@pytest.fixture
def folder(tmp_path):
    return tiny_model(tmp_path, "llama")[1]


def rewrite(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_values_and_rows(tmp_path, dtype):
    tensors = {"a.weight": torch.randn(7, 12).to(dtype), "b.weight": torch.randn(5).to(dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(checkpoint_paths(tmp_path))
    assert set(source.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert source.shape(name) == tuple(tensor.shape)
        np.testing.assert_array_equal(source.read(name), tensor.float().numpy())
    ids = np.array([6, 0, 6])
    np.testing.assert_array_equal(source.rows("a.weight").read(ids), tensors["a.weight"].float().numpy()[ids])


def test_sharded_equals_single(tmp_path):
    _, single = tiny_model(tmp_path / "one", "llama")
    _, sharded = tiny_model(tmp_path / "many", "llama", shard="100KB")
    assert len(checkpoint_paths(sharded)) > 2
    ours, theirs = SafetensorsSource(checkpoint_paths(sharded)), SafetensorsSource(checkpoint_paths(single))
    assert set(ours.names()) == set(theirs.names())
    for name in ours.names():
        np.testing.assert_array_equal(ours.read(name), theirs.read(name))


def test_a_missing_shard_is_named(tmp_path):
    _, folder = tiny_model(tmp_path, "llama", shard="100KB")
    lost = checkpoint_paths(folder)[1]
    lost.unlink()
    with pytest.raises(CorruptCheckpoint, match=lost.name):
        checkpoint_paths(folder)


@pytest.mark.parametrize("shard", [5, None, ["x"], "", "../model.safetensors", "folder"])
def test_an_index_that_names_no_file_is_an_error(tmp_path, shard):
    _, folder = tiny_model(tmp_path, "llama")
    (folder / "folder").mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(CorruptCheckpoint, match=r"index\.json"):
        checkpoint_paths(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight", "model.norm.weight"]
)
def test_a_weight_that_is_no_number_is_named(folder, name, value):
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[5] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CorruptCheckpoint, match="NaN or infinity") as caught:
        Engine.of(str(folder))
    assert caught.value.field == name


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_bad_row_of_a_table_of_tokens_is_let_be(folder, name):
    rewrite(folder, lambda tensors: tensors[name][7].fill_(float("nan")))
    Engine.of(str(folder)).close()


def test_large_weights_are_no_damage(folder):
    """Their sum may be beyond fp32."""
    rewrite(folder, lambda tensors: tensors["model.norm.weight"].fill_(3e38))
    values = SafetensorsSource(checkpoint_paths(folder)).read("model.norm.weight")
    assert (values == np.float32(3e38)).all()


def test_a_missing_tensor_is_named(folder):
    rewrite(folder, lambda t: t.pop(NAME))
    with pytest.raises(CorruptCheckpoint, match=NAME) as caught:
        Engine.of(str(folder))
    assert caught.value.field == NAME


def test_an_extra_tensor_is_named(folder):
    rewrite(folder, lambda t: t.update({"model.layers.9.surprise": torch.zeros(2)}))
    with pytest.raises(CorruptCheckpoint, match="surprise"):
        Engine.of(str(folder))


def test_a_wrong_shape_is_named_with_both_shapes(folder):
    rewrite(folder, lambda t: t.update({NAME: torch.zeros(64, 111)}))
    with pytest.raises(CorruptCheckpoint, match=r"down_proj.*\[64, 111\].*\[64, 112\]"):
        Engine.of(str(folder))


def test_a_repeated_tied_head_and_derived_tensors_are_no_error(tmp_path):
    _, folder = tiny_model(tmp_path, "qwen2")

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    rewrite(folder, add)
    Engine.of(str(folder)).close()


@pytest.mark.parametrize("keep", [0, 4, 200, -1000])
def test_a_truncated_file_is_an_error(folder, keep):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(CorruptCheckpoint, match=r"truncated|damaged") as caught:
        Engine.of(str(folder))
    if keep < 0:
        assert caught.value.field.startswith(("model.", "lm_head"))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [4]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]},
        {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, float("inf")]},
        [],
    ],
)
def test_a_lying_header_is_an_error(tmp_path, entry):
    header = json.dumps({"bad.weight": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CorruptCheckpoint, match=r"bad\.weight"):
        SafetensorsSource(checkpoint_paths(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_header_or_index_nested_without_end_is_an_error(tmp_path, name):
    deep = b"[" * 100_000
    head = b"" if name.endswith(".json") else len(deep).to_bytes(8, "little")
    (tmp_path / name).write_bytes(head + deep)
    with pytest.raises(CorruptCheckpoint) as caught:
        SafetensorsSource(checkpoint_paths(tmp_path))
    assert caught.value.field == str(tmp_path / name)


def test_unknown_number_format_is_refused_by_name(tmp_path):
    header = json.dumps({"odd.weight": {"dtype": "I4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(UnsupportedModel, match=r"odd\.weight"):
        SafetensorsSource(checkpoint_paths(tmp_path)).read("odd.weight")


def test_dummy_is_seeded_by_name(tmp_path):
    a, b, other = Checkpoint(DummySource(3)), Checkpoint(DummySource(3)), Checkpoint(DummySource(4))
    shape = (40, 30)
    np.testing.assert_array_equal(a.take("x.weight", shape), b.take("x.weight", shape))
    assert not np.array_equal(a.take("x.weight", shape), other.take("x.weight", shape))
    assert not np.array_equal(a.take("x.weight", shape), a.take("y.weight", shape))
    assert abs(float(a.take("x.weight", (500, 500)).std()) - 0.02) < 1e-3
    assert a.take("n.norm.weight", (5,)).tolist() == [1.0] * 5


def test_dummy_weights_need_only_a_config(folder):
    (folder / "model.safetensors").unlink()
    engine = Engine.of(str(folder), load_format="dummy")
    sequence = engine.add([5, 6, 7])
    engine.generate([sequence], 5)
    assert len(sequence.generated) == 5
    assert not sequence.errors
    engine.close()


# ------------------------------------------------------------------------------------------------------------- GGUF

TYPES = {
    "token_embd": "Q6_K",
    "attn_q": "Q4_K",
    "attn_k": "Q5_K",
    "attn_v": "Q8_0",
    "attn_output": "F16",
    "ffn_gate": "Q4_0",
    "ffn_up": "Q5_1",
    "ffn_down": "BF16",
}


def quantized_like(array: np.ndarray, kind: gguf.GGMLQuantizationType, rng) -> np.ndarray:
    """Bytes of `array`; K types, which the package cannot make, get random blocks of a sane scale instead."""
    if not kind.name.endswith("_K"):
        return gguf_quantize(array, kind)
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (array.size // elements, nbytes)).astype(np.uint8)
    scale = np.frombuffer(np.float16(4e-4).tobytes(), np.uint8)
    if kind.name == "Q6_K":
        raw[:, -2:] = scale
        raw[:, -18:-2] %= 64
    else:
        raw[:, 0:2] = raw[:, 2:4] = scale
    return raw.reshape(*array.shape[:-1], -1)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a head's rows: pairs (i, i + half) become neighbours."""
    out, into = weight.shape
    return weight.reshape(heads, 2, out // heads // 2, into).swapaxes(1, 2).reshape(out, into)


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    out, into = weight.shape
    return weight.reshape(heads, out // heads // 2, 2, into).swapaxes(1, 2).reshape(out, into)


def write_llama(path, types=TYPES, skip=(), extra=()) -> dict[str, np.ndarray]:
    """A random llama in GGUF with mixed types; returns what a Hugging Face checkpoint of the same weights holds."""
    rng = np.random.default_rng(5)
    hidden, heads, kv, layers, width, vocab = 256, 4, 2, 2, 512, 128
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10000.0)
    kv_out = kv * hidden // heads
    linear = {
        "attn_q": ("self_attn.q_proj", (hidden, hidden)),
        "attn_k": ("self_attn.k_proj", (kv_out, hidden)),
        "attn_v": ("self_attn.v_proj", (kv_out, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, hidden)),
        "ffn_gate": ("mlp.gate_proj", (width, hidden)),
        "ffn_up": ("mlp.up_proj", (width, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, width)),
    }
    saved: dict[str, np.ndarray] = {}

    def put(name, hf_name, shape, kind, heads_of=None):
        kind = gguf.GGMLQuantizationType[kind]
        values = rng.standard_normal(shape, np.float32) * 0.05
        if len(shape) == 1:
            values = 1 + values
        raw = values if kind.name == "F32" else quantized_like(values, kind, rng)
        restored = values if kind.name == "F32" else gguf_dequantize(raw, kind).reshape(shape)
        if heads_of:
            restored = unpermuted(restored, heads_of)
            assert np.array_equal(permuted(restored, heads_of), gguf_dequantize(raw, kind).reshape(shape))
        saved[hf_name] = restored
        if name not in skip:
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)

    put("token_embd", "model.embed_tokens.weight", (vocab, hidden), types["token_embd"])
    put("output_norm", "model.norm.weight", (hidden,), "F32")
    for i in range(layers):
        put(f"blk.{i}.attn_norm", f"model.layers.{i}.input_layernorm.weight", (hidden,), "F32")
        put(f"blk.{i}.ffn_norm", f"model.layers.{i}.post_attention_layernorm.weight", (hidden,), "F32")
        for name, (hf, shape) in linear.items():
            owner = {"attn_q": heads, "attn_k": kv}.get(name)
            put(f"blk.{i}.{name}", f"model.layers.{i}.{hf}.weight", shape, types[name], owner)
    for name in extra:
        writer.add_tensor(name, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return saved


def test_gguf_rows_are_those_of_the_tensor(tmp_path):
    write_llama(tmp_path / "m.gguf")
    source = GGUFSource(read_gguf(tmp_path / "m.gguf"))
    ids = np.array([0, 127, 5, 5])
    np.testing.assert_array_equal(source.rows("token_embd.weight").read(ids), source.read("token_embd.weight")[ids])


def test_gguf_and_its_safetensors_twin_give_the_same_tokens(tmp_path):
    """The row order of query and key heads differs between the two formats; the outputs must not."""
    saved = write_llama(tmp_path / "m.gguf")
    twin = tmp_path / "twin"
    twin.mkdir()
    save_file({k: torch.from_numpy(v.copy()) for k, v in saved.items()}, twin / "model.safetensors")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    (twin / "config.json").write_text(json.dumps(config))
    found = []
    for path in (tmp_path / "m.gguf", twin):
        engine = Engine.of(str(path), threads=1)
        sequence = engine.add(range(3, 60), prompt_logprobs=128)
        engine.generate([sequence], 10)
        found.append(np.array([sorted(zip(e.top_ids, e.top_logprobs, strict=True)) for e in sequence.prompt_logprobs]))
        engine.close()
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


def test_gguf_missing_tensor_is_named(tmp_path):
    write_llama(tmp_path / "m.gguf", skip=("blk.1.ffn_up",))
    with pytest.raises(CorruptCheckpoint, match=r"blk\.1\.ffn_up\.weight"):
        Engine.of(str(tmp_path / "m.gguf"))


def test_gguf_extra_tensor_is_named(tmp_path):
    write_llama(tmp_path / "m.gguf", extra=("blk.0.odd.weight",))
    with pytest.raises(CorruptCheckpoint, match=r"blk\.0\.odd"):
        Engine.of(str(tmp_path / "m.gguf"))


def test_gguf_unsupported_type_names_the_tensor(tmp_path):
    write_llama(tmp_path / "m.gguf", types=TYPES | {"ffn_gate": "TQ1_0"})
    with pytest.raises(UnsupportedModel, match=r"ffn_gate.*tq1_0"):
        Engine.of(str(tmp_path / "m.gguf"))


def test_gguf_truncated_names_the_tensor(tmp_path):
    write_llama(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data[:-5000])
    with pytest.raises(CorruptCheckpoint, match=r"blk|truncated"):
        Engine.of(str(tmp_path / "m.gguf"))


def test_gguf_shrunk_after_its_header_was_read(tmp_path):
    write_llama(tmp_path / "m.gguf")
    header = read_gguf(tmp_path / "m.gguf")
    last = max(header.tensors.values(), key=lambda t: t.offset)
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[: last.offset + 10])
    with pytest.raises(CorruptCheckpoint, match=last.name):
        GGUFSource(header).read(last.name)
