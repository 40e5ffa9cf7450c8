"""The model that is quantized, under Hugging Face names: a folder of safetensors, or a GGUF file seen as one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from msgspec.structs import fields, replace

from headrace.base.errors import InvalidInput, UnsupportedModel
from headrace.base.files import write_atomic
from headrace.engine.models import MODELS
from headrace.engine.weights.gguf import GGUFSource
from headrace.engine.weights.names import Names
from headrace.engine.weights.safetensors import SafetensorsSource, checkpoint_paths
from headrace.engine.weights.source import Floats, Rows
from headrace.spec.hf import spec_from_hf
from headrace.spec.locate import ModelFiles
from headrace.spec.model import Attention, DenseMLP, ModelSpec, MoE

_TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


class Original(Protocol):
    """`spec` and `config` describe the same model; `dtype` is the type that readers of a folder of it will compute in."""

    spec: ModelSpec
    config: Mapping[str, Any]
    dtype: torch.dtype
    nbytes: int

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Floats:
        """The tensor in fp32."""
        ...

    def rows(self, name: str) -> Rows: ...

    def raw(self, name: str) -> torch.Tensor:
        """The tensor as a folder should keep it where it is not quantized."""
        ...

    def identity(self) -> str:
        """Changes when the files do."""
        ...

    def write_rest(self, out: Path) -> None:
        """Put tokenizer, chat template and generation settings into `out`."""
        ...


def original(files: ModelFiles) -> Original:
    """What `files` hold; InvalidInput if that is no weights or quantized in a folder already."""
    if not files.weights:
        raise InvalidInput(
            f"{files.name} has no weights", field="model", remedy="give a folder with safetensors, or a GGUF file"
        )
    if files.kind == "gguf":
        return GGUFOriginal(files)
    if files.quantization() is not None:
        raise InvalidInput(
            f"{files.name} is quantized already ({files.spec().checkpoint_precision})",
            field="model",
            remedy="give the unquantized model",
        )
    return FolderOriginal(files)


class FolderOriginal:
    """A folder of safetensors; what is not quantized stays in the file's bits."""

    def __init__(self, files: ModelFiles) -> None:
        self.spec = files.spec()
        self.config = files.config()
        self.dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(self.spec.checkpoint_precision, torch.bfloat16)
        self._paths = checkpoint_paths(files.root)
        self._root = files.root
        self._source = SafetensorsSource(self._paths)
        self.nbytes = sum(path.stat().st_size for path in self._paths)

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str) -> Floats:
        return self._source.read(name)

    def rows(self, name: str) -> Rows:
        return self._source.rows(name)

    def raw(self, name: str) -> torch.Tensor:
        kind = self._source.dtype(name)
        if kind not in _TORCH:
            raise UnsupportedModel(f"tensor {name!r} has type {kind}", field=name)
        return torch.from_numpy(np.array(self._source.codes(name))).view(_TORCH[kind])

    def identity(self) -> str:
        return _identity(self._paths)

    def write_rest(self, out: Path) -> None:
        for name in _COPIED:
            if (self._root / name).is_file():
                shutil.copyfile(self._root / name, out / name)


class GGUFOriginal:
    """A GGUF file, its values in fp16, its rows in the order that Hugging Face's code expects.

    The config is written from the geometry, read back and compared with it: a model whose config cannot say all that the
    file does is an UnsupportedModel.
    """

    dtype = torch.float16

    def __init__(self, files: ModelFiles) -> None:
        header, geometry = files.gguf(), files.spec()
        write = _CONFIGS.get(geometry.model_type)
        if write is None:
            raise UnsupportedModel(
                f"no config can be written for {geometry.model_type} models in GGUF files",
                field="model_type",
                remedy="give the model's folder; GGUF files of these are known: " + ", ".join(_CONFIGS),
            )
        self.config = write(geometry)
        self.spec = dataclasses.replace(spec_from_hf(self.config, geometry.name), eos_token_ids=geometry.eos_token_ids)
        _compare(geometry, self.spec)
        self._header = header
        self._source = GGUFSource(header)
        self._permuted = any(
            isinstance(layer.mixer, Attention) and layer.mixer.rope is not None and layer.mixer.rope.interleaved
            for layer in geometry.layers
        )
        self._paths = files.weights
        self.nbytes = sum(path.stat().st_size for path in files.weights)

    @cached_property
    def _stored_as(self) -> dict[str, str]:
        """GGUF name of each tensor by its Hugging Face name."""
        architecture = MODELS.get(self.spec.model_type)
        patterns = dict(_pairs(architecture.gguf, architecture.hf))
        found = {}
        for name in self._source.names():
            stem, _, ending = name.rpartition(".")
            layer = re.match(r"blk\.(\d+)\.", stem)
            pattern = stem if layer is None else stem.replace(layer[0], "blk.{i}.", 1)
            if pattern in patterns:
                found[f"{patterns[pattern].format(i=layer[1] if layer else '')}.{ending}"] = name
            elif not pattern.startswith("rope_"):
                raise UnsupportedModel(f"a {self.spec.model_type} folder has no tensor like {name!r}", field=name)
        return found

    def names(self) -> Iterable[str]:
        return self._stored_as

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._stored_as[name])

    def read(self, name: str) -> Floats:
        values = self._source.read(self._stored_as[name])
        if self._permuted and (heads := self._heads(name)):
            # Rows lie so that rotary pairs are neighbours; the folder's order has them half a head apart.
            pairs = values.reshape(heads, -1, 2, *values.shape[1:])
            values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
        if self.spec.norm_offset and "norm" in name:
            values = values - 1
        return self._halves(name, values).astype(np.float32)

    def rows(self, name: str) -> Rows:
        return self._source.rows(self._stored_as[name])

    def raw(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.read(name)).half()

    def identity(self) -> str:
        return _identity(self._paths)

    def write_rest(self, out: Path) -> None:
        from headrace.text.template import ChatTemplate
        from headrace.text.tokenizer import Tokenizer

        metadata = self._header.metadata
        tokenizer = Tokenizer.from_gguf(metadata)
        write_atomic(out / "tokenizer.json", tokenizer.to_json())
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
        if template := ChatTemplate.from_gguf(metadata).sources.get("default"):
            settings["chat_template"] = template
        write_atomic(out / "tokenizer_config.json", json.dumps(settings, indent=2))
        ends = list(self.spec.eos_token_ids or tokenizer.eos_token_ids)
        generation = {"bos_token_id": self.spec.bos_token_id, "eos_token_id": ends}
        write_atomic(out / "generation_config.json", json.dumps(generation, indent=2))

    def _heads(self, name: str) -> int:
        mixer = self.spec.layers[0].mixer
        assert isinstance(mixer, Attention)
        return mixer.num_heads if ".q_proj." in name else mixer.num_kv_heads if ".k_proj." in name else 0

    def _halves(self, name: str, values: Floats) -> np.ndarray:
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        if not np.isfinite(halves).all():
            raise UnsupportedModel(f"tensor {name!r} holds values beyond fp16", field=name)
        return halves


def _pairs(gguf: Names, hf: Names) -> Iterable[tuple[str, str]]:
    for field in fields(Names):
        stored, wanted = getattr(gguf, field.name), getattr(hf, field.name)
        if stored is not None and wanted is not None:
            yield stored, wanted


def _identity(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------------- configs of GGUF files


def _llama(spec: ModelSpec) -> dict[str, Any]:
    first = _attention(spec)
    return {
        **_shared(spec, "LlamaForCausalLM"),
        "hidden_act": "silu",
        "rope_theta": _theta(first),
        "attention_bias": first.qkv_bias,
        "mlp_bias": False,
    }


def _qwen(architecture: str) -> Callable[[ModelSpec], dict[str, Any]]:
    def write(spec: ModelSpec) -> dict[str, Any]:
        return {**_shared(spec, architecture), "hidden_act": "silu", "rope_theta": _theta(_attention(spec))}

    return write


def _gemma3(spec: ModelSpec) -> dict[str, Any]:
    attentions = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)]
    sliding = next((a for a in attentions if a.window is not None), None)
    full = next((a for a in attentions if a.window is None), None)
    if sliding is None or full is None:
        raise UnsupportedModel("a Gemma 3 model without both kinds of layers", field="sliding_window")
    return {
        **_shared(spec, "Gemma3ForCausalLM"),
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": _theta(full),
        "rope_local_base_freq": _theta(sliding),
        "sliding_window": sliding.window,
        "layer_types": ["full_attention" if a.window is None else "sliding_attention" for a in attentions],
        "query_pre_attn_scalar": full.head_dim if full.scale is None else round(full.scale**-2),
        "final_logit_softcapping": spec.logit_softcap,
        "attention_bias": full.qkv_bias,
    }


_CONFIGS: dict[str, Callable[[ModelSpec], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen("Qwen2ForCausalLM"),
    "qwen3": _qwen("Qwen3ForCausalLM"),
    "gemma3_text": _gemma3,
}


def _shared(spec: ModelSpec, architecture: str) -> dict[str, Any]:
    attention, mlp = _attention(spec), spec.layers[0].mlp
    if not isinstance(mlp, DenseMLP):
        kind = "experts" if isinstance(mlp, MoE) else "layers without an MLP"
        raise UnsupportedModel(f"GGUF files with {kind} cannot be written as a folder", field="model_type")
    return {
        "architectures": [architecture],
        "model_type": spec.model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": mlp.intermediate,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids) or None,
        "dtype": "float16",
        "torch_dtype": "float16",
    }


def _attention(spec: ModelSpec) -> Attention:
    mixer = spec.layers[0].mixer
    if not isinstance(mixer, Attention):
        raise UnsupportedModel(f"{spec.model_type} has layers without attention", field="model_type")
    return mixer


def _theta(attention: Attention) -> float:
    return 10_000.0 if attention.rope is None else attention.rope.theta


def _compare(geometry: ModelSpec, written: ModelSpec) -> None:
    """UnsupportedModel names the first property of the file that the written config does not give back."""
    for field in ("vocab_size", "hidden_size", "tied_embeddings", "max_context", "norm_eps", "logit_softcap"):
        if getattr(geometry, field) != getattr(written, field):
            raise UnsupportedModel(f"{field} cannot be expressed in a config of {written.model_type}", field=field)
    if abs(geometry.embedding_scale - written.embedding_scale) > 1e-3:
        raise UnsupportedModel("the embedding's scale cannot be expressed in a config", field="embedding_scale")
    for i, (there, here) in enumerate(zip(geometry.layers, written.layers, strict=True)):
        if replace(there, mixer=_plain(there.mixer)) != replace(here, mixer=_plain(here.mixer)):
            raise UnsupportedModel(
                f"layer {i} cannot be described in a config of {written.model_type}: {there} became {here}",
                field="model_type",
            )


def _plain(mixer: Any) -> Any:
    """The mixer without what the two kinds of files say differently."""
    if not isinstance(mixer, Attention):
        return mixer
    rope = mixer.rope and replace(mixer.rope, interleaved=False)
    scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
    return replace(mixer, rope=rope, scale=round(scale, 6))
