"""GGUF headers: the real file, every value type, shards, geometry per architecture, and hostile bytes."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import Tensor, gguf_bytes, packed, text, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.base.errors import CorruptCheckpoint, HeadraceError, InvalidInput, UnsupportedModel
from headrace.spec import accounting
from headrace.spec.gguf import GGUFHeader, read_gguf, spec_from_gguf
from headrace.spec.locate import locate
from headrace.spec.model import Attention, LatentAttention, MoE

HIDDEN, HEADS, KV_HEADS, DIM, WIDTH, VOCAB = 64, 4, 2, 16, 96, 160


def base(architecture: str, layers: int = 2, **extra: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": layers, "context_length": 512, "embedding_length": HIDDEN, "feed_forward_length": WIDTH,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    keys |= {k.replace("__", "."): v for k, v in extra.items()}
    values = {f"{architecture}.{k}": v for k, v in keys.items() if v is not None}
    return {"general.architecture": architecture, "general.name": "tiny", "tokenizer.ggml.eos_token_id": 2, **values}


def outer(*, head: bool = True) -> list[Tensor]:
    tensors: list[Tensor] = [("token_embd.weight", (VOCAB, HIDDEN), "q8_0"), ("output_norm.weight", (HIDDEN,), "f32")]
    return [*tensors, ("output.weight", (VOCAB, HIDDEN), "q6_k")] if head and HIDDEN % 256 == 0 else (
        [*tensors, ("output.weight", (VOCAB, HIDDEN), "q8_0")] if head else tensors
    )  # fmt: skip


def attention_tensors(i: int, *, bias: bool = False, norm: bool = False, dim: int = DIM) -> list[Tensor]:
    q, kv = HEADS * dim, KV_HEADS * dim
    tensors: list[Tensor] = [
        (f"blk.{i}.attn_norm.weight", (HIDDEN,), "f32"),
        (f"blk.{i}.attn_q.weight", (q, HIDDEN), "q4_1"),
        (f"blk.{i}.attn_k.weight", (kv, HIDDEN), "q4_1"),
        (f"blk.{i}.attn_v.weight", (kv, HIDDEN), "q4_1"),
        (f"blk.{i}.attn_output.weight", (HIDDEN, q), "q4_1"),
        (f"blk.{i}.ffn_norm.weight", (HIDDEN,), "f32"),
    ]
    if bias:
        tensors += [(f"blk.{i}.attn_{x}.bias", (n,), "f32") for x, n in (("q", q), ("k", kv), ("v", kv))]
    if norm:
        tensors += [(f"blk.{i}.attn_{x}_norm.weight", (dim,), "f32") for x in ("q", "k")]
    return tensors


def mlp_tensors(i: int) -> list[Tensor]:
    return [
        (f"blk.{i}.ffn_gate.weight", (WIDTH, HIDDEN), "q4_1"),
        (f"blk.{i}.ffn_up.weight", (WIDTH, HIDDEN), "q4_1"),
        (f"blk.{i}.ffn_down.weight", (HIDDEN, WIDTH), "q4_1"),
    ]


def expert_tensors(i: int, *, shared: int = 0, gate: bool = False) -> list[Tensor]:
    tensors: list[Tensor] = [
        (f"blk.{i}.ffn_gate_inp.weight", (4, HIDDEN), "f32"),
        (f"blk.{i}.ffn_gate_exps.weight", (4, 32, HIDDEN), "q4_1"),
        (f"blk.{i}.ffn_up_exps.weight", (4, 32, HIDDEN), "q4_1"),
        (f"blk.{i}.ffn_down_exps.weight", (4, HIDDEN, 32), "q4_1"),
    ]
    if shared:
        tensors += [
            (f"blk.{i}.ffn_gate_shexp.weight", (shared, HIDDEN), "q4_1"),
            (f"blk.{i}.ffn_up_shexp.weight", (shared, HIDDEN), "q4_1"),
            (f"blk.{i}.ffn_down_shexp.weight", (HIDDEN, shared), "q4_1"),
        ]
    return [*tensors, (f"blk.{i}.ffn_gate_inp_shexp.weight", (HIDDEN,), "f32")] if gate else tensors


def each(count: int, *parts: Callable[[int], list[Tensor]]) -> list[Tensor]:
    return [t for i in range(count) for part in parts for t in part(i)]


def gemma_tensors(i: int, *, norm: bool) -> list[Tensor]:
    after: list[Tensor] = [
        (f"blk.{i}.post_attention_norm.weight", (HIDDEN,), "f32"),
        (f"blk.{i}.post_ffw_norm.weight", (HIDDEN,), "f32"),
    ]
    return attention_tensors(i, norm=norm) + mlp_tensors(i) + after


def oss_tensors(i: int) -> list[Tensor]:
    extra: list[Tensor] = [
        (f"blk.{i}.attn_sinks.weight", (HEADS,), "f32"),
        (f"blk.{i}.attn_output.bias", (HIDDEN,), "f32"),
        (f"blk.{i}.ffn_gate_inp.bias", (4,), "f32"),
        (f"blk.{i}.ffn_gate_exps.bias", (4, 32), "f32"),
        (f"blk.{i}.ffn_up_exps.bias", (4, 32), "f32"),
        (f"blk.{i}.ffn_down_exps.bias", (4, HIDDEN), "f32"),
    ]
    return attention_tensors(i, bias=True) + expert_tensors(i) + extra


def latent_tensors(i: int) -> list[Tensor]:
    return [
        (f"blk.{i}.attn_norm.weight", (HIDDEN,), "f32"),
        (f"blk.{i}.attn_q_a.weight", (32, HIDDEN), "q4_1"),
        (f"blk.{i}.attn_q_a_norm.weight", (32,), "f32"),
        (f"blk.{i}.attn_q_b.weight", (HEADS * 24, 32), "q4_1"),
        (f"blk.{i}.attn_kv_a_mqa.weight", (32 + 8, HIDDEN), "q4_1"),
        (f"blk.{i}.attn_kv_a_norm.weight", (32,), "f32"),
        (f"blk.{i}.attn_kv_b.weight", (HEADS * (16 + 12), 32), "q4_1"),
        (f"blk.{i}.attn_output.weight", (HIDDEN, HEADS * 12), "f16"),
        (f"blk.{i}.ffn_norm.weight", (HIDDEN,), "f32"),
    ]


def phi_tensors(i: int) -> list[Tensor]:
    return [
        (f"blk.{i}.attn_norm.weight", (HIDDEN,), "f32"),
        (f"blk.{i}.attn_qkv.weight", ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), "q4_1"),
        (f"blk.{i}.attn_output.weight", (HIDDEN, HEADS * DIM), "q4_1"),
        (f"blk.{i}.ffn_norm.weight", (HIDDEN,), "f32"),
        (f"blk.{i}.ffn_up.weight", (2 * WIDTH, HIDDEN), "q4_1"),
        (f"blk.{i}.ffn_down.weight", (HIDDEN, WIDTH), "q4_1"),
    ]


EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2}
ARCHITECTURES: dict[str, tuple[dict[str, Any], list[Tensor]]] = {
    "llama": (base("llama"), outer() + each(2, attention_tensors, mlp_tensors)),
    "llama-tied": (base("llama"), outer(head=False) + each(2, attention_tensors, mlp_tensors)),
    "mixtral": (base("llama", **EXPERT_KEYS), outer() + each(2, attention_tensors, expert_tensors)),
    "qwen2": (base("qwen2"), outer() + each(2, lambda i: attention_tensors(i, bias=True), mlp_tensors)),
    "qwen2moe": (
        base("qwen2moe", **EXPERT_KEYS),
        outer() + each(2, lambda i: attention_tensors(i, bias=True), lambda i: expert_tensors(i, shared=64, gate=True)),
    ),
    "qwen3": (
        base("qwen3", attention__key_length=32, attention__value_length=32),
        outer(head=False) + each(2, lambda i: attention_tensors(i, norm=True, dim=32), mlp_tensors),
    ),
    "qwen3moe": (
        base("qwen3moe", attention__key_length=DIM, attention__value_length=DIM, expert_feed_forward_length=32, **EXPERT_KEYS),
        outer() + each(2, lambda i: attention_tensors(i, norm=True), expert_tensors),
    ),
    "gemma": (
        base("gemma", attention__key_length=DIM, attention__value_length=DIM),
        outer(head=False) + each(2, attention_tensors, mlp_tensors),
    ),
    "gemma2": (
        base("gemma2", attention__key_length=DIM, attention__value_length=DIM, attention__sliding_window=64,
             attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
        outer(head=False) + each(2, lambda i: gemma_tensors(i, norm=False)),
    ),
    "gemma3": (
        base("gemma3", 7, attention__key_length=DIM, attention__value_length=DIM, attention__sliding_window=64,
             rope__freq_base=1e6),
        outer(head=False) + each(7, lambda i: gemma_tensors(i, norm=True)),
    ),
    "phi3": (base("phi3", attention__sliding_window=200), outer() + each(2, phi_tensors)),
    "gpt-oss": (
        base("gpt-oss", attention__key_length=DIM, attention__value_length=DIM, attention__sliding_window=128, **EXPERT_KEYS),
        outer() + each(2, oss_tensors),
    ),
    "deepseek2": (
        base("deepseek2", 3, attention__head_count_kv=1, attention__q_lora_rank=32, attention__kv_lora_rank=32,
             attention__key_length=40, attention__value_length=32, attention__key_length_mla=24,
             attention__value_length_mla=12, rope__dimension_count=8, leading_dense_block_count=1, expert_gating_func=2,
             **EXPERT_KEYS),
        outer() + each(3, latent_tensors) + mlp_tensors(0)
        + [t for i in (1, 2) for t in (*expert_tensors(i, shared=64), (f"blk.{i}.exp_probs_b.bias", (4,), "f32"))],
    ),
}  # fmt: skip


def header_of(tmp_path: Path, case: str, **kwargs: Any) -> GGUFHeader:
    metadata, tensors = ARCHITECTURES[case]
    return read_gguf(write(tmp_path / "model.gguf", metadata, tensors, **kwargs))


@pytest.fixture(scope="module")
def real() -> GGUFHeader:
    return locate("smollm2-135m").gguf()


def test_the_real_file_equals_what_the_gguf_package_reads(real: GGUFHeader) -> None:
    from gguf import GGUFReader

    theirs = GGUFReader(str(real.path))
    assert {t.name: (tuple(int(n) for n in reversed(t.shape)), t.tensor_type.name.lower(), t.data_offset, t.n_bytes)
            for t in theirs.tensors} == {
        t.name: (t.shape, t.type.name, t.offset, t.nbytes) for t in real.tensors.values()
    }  # fmt: skip
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        mine = real.metadata[key]
        expected = field.contents()
        assert (mine.tolist() if isinstance(mine, np.ndarray) else mine) == expected, key
    assert len(real.metadata["tokenizer.ggml.tokens"]) == 49_152


def test_the_real_model(real: GGUFHeader) -> None:
    spec = spec_from_gguf(real)
    assert accounting.parameters(spec).total == sum(prod(t.shape) for t in real.tensors.values()) == 134_515_008
    assert (spec.model_type, spec.num_layers, spec.tied_embeddings, spec.max_context) == ("llama", 30, True, 8192)
    assert (spec.vocab_size, spec.eos_token_ids, spec.bos_token_id) == (49_152, (2,), 1)
    first = spec.layers[0].mixer
    assert isinstance(first, Attention)
    assert (first.num_heads, first.num_kv_heads, first.head_dim) == (9, 3, 64)
    assert first.rope is not None
    assert first.rope.interleaved
    assert first.rope.theta == 100_000
    assert accounting.file_weight_bytes(real).total == real.tensor_bytes == 96_576_768
    # The tied table is read as the head, so a decode step reads the whole file.
    assert accounting.file_weights_read_bytes(spec, real) == real.tensor_bytes
    assert accounting.kv_bytes_per_token(spec, "fp16") == 30 * 3 * 64 * 2 * 2


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_geometry_counts_every_element_of_the_file(tmp_path: Path, case: str) -> None:
    header = header_of(tmp_path, case)
    spec = spec_from_gguf(header)
    assert accounting.parameters(spec).total == sum(prod(t.shape) for t in header.tensors.values())
    by_part = accounting.parameters(spec).by_part
    stored = accounting.file_weight_bytes(header).by_part
    assert {part for part, n in by_part.items() if n} == {part for part, n in stored.items() if n}
    assert spec.checkpoint_precision == "q4_1"
    assert spec.eos_token_ids == (2,)


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_only_architectures_whose_rows_are_permuted_are_interleaved(tmp_path: Path, case: str) -> None:
    spec = spec_from_gguf(header_of(tmp_path, case))
    for layer in spec.layers:
        assert isinstance(layer.mixer, Attention | LatentAttention)
        assert layer.mixer.rope is not None
        assert layer.mixer.rope.interleaved == (case in ("llama", "llama-tied", "mixtral", "deepseek2"))


def test_particulars_of_architectures(tmp_path: Path) -> None:
    gemma = spec_from_gguf(header_of(tmp_path, "gemma3"))
    mixers = [layer.mixer for layer in gemma.layers]
    assert [m.window for m in mixers if isinstance(m, Attention)] == [64] * 5 + [None, 64]
    assert [m.rope.theta for m in mixers if isinstance(m, Attention) and m.rope] == [1e4] * 5 + [1e6, 1e4]
    assert not gemma.norm_offset  # the converter has added the 1
    oss = spec_from_gguf(header_of(tmp_path, "gpt-oss")).layers[0]
    assert isinstance(oss.mixer, Attention)
    assert isinstance(oss.mlp, MoE)
    assert (oss.mixer.sinks, oss.mixer.window, oss.mlp.bias, oss.mlp.activation) == (True, 128, True, "clamped_swiglu")
    deepseek = spec_from_gguf(header_of(tmp_path, "deepseek2"))
    assert deepseek.model_type == "deepseek_v3"
    assert accounting.kv_bytes_per_token(deepseek, "bf16") == 3 * (32 + 8) * 2
    moe = deepseek.layers[1].mlp
    assert isinstance(moe, MoE)
    assert (moe.scoring, moe.router_correction, moe.shared_intermediate) == ("sigmoid", True, 64)


def test_rope_factors_come_from_their_tensor(tmp_path: Path) -> None:
    metadata, tensors = ARCHITECTURES["llama"]
    path = tmp_path / "model.gguf"
    raw = bytearray(gguf_bytes(metadata, [*tensors, ("rope_freqs.weight", (DIM // 2,), "f32")]))
    factors = np.linspace(1, 8, DIM // 2, dtype="<f4")
    raw[-DIM // 2 * 4 :] = factors.tobytes()
    path.write_bytes(raw)
    mixer = spec_from_gguf(read_gguf(path)).layers[0].mixer
    assert isinstance(mixer, Attention)
    assert mixer.rope is not None
    assert mixer.rope.freq_factors == tuple(float(f) for f in factors)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("order", ["<", ">"])
def test_versions_and_byte_orders(tmp_path: Path, version: int, order: str) -> None:
    header = header_of(tmp_path, "llama", version=version, order=order)
    assert (header.version, header.byte_order) == (version, "little" if order == "<" else "big")
    assert accounting.parameters(spec_from_gguf(header)).total > 0


def test_every_value_type(tmp_path: Path) -> None:
    scalars = {0: ("B", 200), 1: ("b", -5), 2: ("H", 60_000), 3: ("h", -3000), 4: ("I", 2**31), 5: ("i", -(2**30)),
               6: ("f", 0.5), 7: ("?", True), 10: ("Q", 2**63), 11: ("q", -(2**62)), 12: ("d", 0.1)}  # fmt: skip
    body, count = b"", 0
    for code, (letter, value) in scalars.items():
        body += text(f"scalar.{code}") + struct.pack("<I" + letter, code, value)
        body += text(f"array.{code}") + struct.pack("<IIQ" + letter * 2, 9, code, 2, value, value)
        count += 2
    nested = struct.pack("<IIQ", 9, 9, 2) + packed([1, 2])[4:] + packed(["a", "é"])[4:]
    body += text("strings") + packed(["x", "", "漢字"]) + text("nested") + nested
    path = tmp_path / "values.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, count + 2) + body)
    metadata = read_gguf(path).metadata
    for code, (_, value) in scalars.items():
        assert metadata[f"scalar.{code}"] == value
        assert metadata[f"array.{code}"].tolist() == [value, value]
    assert metadata["strings"] == ["x", "", "漢字"]
    assert metadata["nested"][0].tolist() == [1, 2]
    assert metadata["nested"][1] == ["a", "é"]


def test_shards_are_read_as_one_model_from_any_of_them(tmp_path: Path) -> None:
    metadata, tensors = ARCHITECTURES["llama"]
    names = [tmp_path / f"tiny-{n:05d}-of-00002.gguf" for n in (1, 2)]
    write(names[0], metadata | {"split.count": 2, "split.tensors.count": len(tensors)}, tensors[:5])
    write(names[1], {"split.no": 1}, tensors[5:])
    for given_path in names:
        header = read_gguf(given_path)
        assert set(header.tensors) == {t[0] for t in tensors}
        assert header.paths == tuple(names)
    assert (
        accounting.parameters(locate(str(names[0])).spec()).total == accounting.parameters(spec_from_gguf(header)).total
    )
    names[1].unlink()
    with pytest.raises(CorruptCheckpoint, match="00002-of-00002"):
        read_gguf(names[0])


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"general.architecture": "tomorrow"}, [("token_embd.weight", (4, 32), "f32")])
    with pytest.raises(UnsupportedModel, match="tomorrow"):
        spec_from_gguf(read_gguf(path))


def test_experts_stored_one_by_one_are_refused_with_a_remedy(tmp_path: Path) -> None:
    metadata, tensors = ARCHITECTURES["llama"]
    old: list[Tensor] = [("blk.0.ffn_gate.0.weight", (32, HIDDEN), "q4_1")]
    with pytest.raises(UnsupportedModel, match="convert or download it again"):
        spec_from_gguf(read_gguf(write(tmp_path / "m.gguf", metadata, tensors + old)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.dimension_count", 7),
        ("rope.dimension_count", 0),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", -1.0),
        ("rope.freq_base", float("inf")),
        ("rope.freq_base", float("nan")),
        ("attention.layer_norm_rms_epsilon", -1.0),
        ("attention.head_count", 2**31),
    ],
)
def test_a_number_that_cannot_be_is_named(tmp_path: Path, key: str, value: float) -> None:
    metadata, tensors = ARCHITECTURES["llama"]
    changed = metadata | {f"llama.{key}": value}
    with pytest.raises(HeadraceError) as caught:
        spec_from_gguf(read_gguf(write(tmp_path / "m.gguf", changed, tensors)))
    assert caught.value.field in (f"llama.{key}", "norm_eps", "num_attention_heads")


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length", "attention.head_count"])
def test_a_missing_metadata_key_is_named(tmp_path: Path, key: str) -> None:
    metadata, tensors = ARCHITECTURES["llama"]
    without = {k: v for k, v in metadata.items() if k != f"llama.{key}"}
    with pytest.raises(CorruptCheckpoint, match=key):
        spec_from_gguf(read_gguf(write(tmp_path / "m.gguf", without, tensors)))


def corrupted(tmp_path: Path, raw: bytes) -> Path:
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "too short"),
        (b"GGML" + bytes(60), "not a GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensors cannot fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), "entries cannot fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63) + bytes(40), "past the end"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 77) + bytes(9), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 6, 2**61), "cannot fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**50), "cannot fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1) * 9, "array"),
        (gguf_bytes({"a": 1}, [])[:38], "truncated"),
        (gguf_bytes({"general.alignment": 24}, []), "alignment"),
    ],
)  # fmt: skip
def test_corrupt_headers_say_what_is_wrong(tmp_path: Path, raw: bytes, said: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=said):
        read_gguf(corrupted(tmp_path, raw))


def test_tensors_past_the_end_unaligned_overlapping_or_of_unknown_type(tmp_path: Path) -> None:
    tensors: list[Tensor] = [("first", (4, 32), "f32"), ("second", (4, 32), "f32")]
    whole = gguf_bytes({}, tensors)
    with pytest.raises(CorruptCheckpoint, match=r"second.*truncated"):
        read_gguf(corrupted(tmp_path, whole[:-1]))

    def with_entry(name: str, *, kind: int = 0, offset: int = 512, dims: tuple[int, ...] = (32, 4)) -> Path:
        at = whole.index(text(name)) + len(text(name))
        entry = struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)
        return corrupted(tmp_path, whole[:at] + entry + whole[at + 4 + 16 + 12 :])

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"offset": 1 << 40}, r"second.*truncated"),
        ({"offset": 7}, "not aligned"),
        ({"offset": 0}, "overlap"),
        ({"kind": 4}, "unknown type 4"),
        ({"dims": (2**40, 2**40)}, r"second.*truncated"),
        ({"kind": 8, "dims": (31, 4)}, "whole q8_0 blocks"),
    ]
    for change, said in wrong:
        with pytest.raises(CorruptCheckpoint, match=said):
            read_gguf(with_entry("second", **change))
    with pytest.raises(CorruptCheckpoint, match="twice"):
        read_gguf(corrupted(tmp_path, whole.replace(text("second"), text("first")[:8] + b"first")))


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no such file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(InvalidInput):
        read_gguf(tmp_path)


def test_a_file_without_tensors(tmp_path: Path) -> None:
    metadata, _ = ARCHITECTURES["qwen2"]
    header = read_gguf(corrupted(tmp_path, gguf_bytes(metadata, [])))
    with pytest.raises(CorruptCheckpoint, match="holds no tensors"):
        spec_from_gguf(header)


_SMALL = gguf_bytes(*ARCHITECTURES["qwen2"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=400)
@given(data=st.data())
def test_fuzzed_headers_give_a_model_or_a_clear_error(tmp_path: Path, data: st.DataObject) -> None:
    """Flips, cuts and splices of a good file: never another exception, a hang or a huge allocation."""
    raw = bytearray(_SMALL)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(4000, len(raw) - 1)))
        match data.draw(st.sampled_from(["byte", "word", "cut", "insert"])):
            case "byte":
                raw[at] = data.draw(st.integers(0, 255))
            case "word":
                value = data.draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 9, 4096]))
                raw[at : at + 8] = struct.pack("<Q", value)
            case "cut":
                del raw[at : at + data.draw(st.integers(1, 64))]
            case "insert":
                raw[at:at] = data.draw(st.binary(max_size=40))
    path = corrupted(tmp_path, bytes(raw))
    with contextlib.suppress(HeadraceError):
        assert spec_from_gguf(read_gguf(path)).num_layers <= 10_000


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=300), counts=st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_random_bytes_behind_the_magic(tmp_path: Path, tail: bytes, counts: tuple[int, int]) -> None:
    path = corrupted(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, *counts) + tail)
    with contextlib.suppress(HeadraceError):
        assert isinstance(read_gguf(path), GGUFHeader)
