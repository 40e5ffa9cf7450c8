"""`ModelSpec` from a Hugging Face `config.json`: any model type that has a file in `headrace.spec.families`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.base.errors import InvalidInput, UnsupportedModel
from headrace.base.registry import Registry
from headrace.spec.families._config import Config
from headrace.spec.model import ModelSpec
from headrace.spec.quantization import checkpoint_format, dtype_precision

FAMILIES = Registry("headrace.spec.families", "build", kind="model_type")


def spec_from_hf(config: Mapping[str, Any], name: str = "") -> ModelSpec:
    """Geometry of the model that `config` (a parsed `config.json`) describes.

    Multimodal wrappers give their language model (`text_config`). Raises InvalidInput naming a missing or contradictory
    key, UnsupportedModel naming a `model_type` that has no family file: geometry is never guessed.
    """
    if not isinstance(config, Mapping):
        raise InvalidInput("a model config must be a JSON object", field="config.json")
    text = language_config(config)
    c = Config(text, name or str(config.get("_name_or_path") or ""))
    model_type = c.text("model_type")
    known = FAMILIES.names()
    if model_type.replace("_", "-") not in known or model_type.startswith("_"):
        raise UnsupportedModel(
            f"model_type {model_type!r} is not supported", field="model_type", remedy="supported: " + ", ".join(known)
        )
    spec: ModelSpec = FAMILIES.get(model_type)(c)
    precision, unquantized = checkpoint_format(config if config.get("quantization_config") else text, spec)
    outer = Config(config)
    eos = outer.integers("eos_token_id") or c.integers("eos_token_id") or ()
    bos = outer.integers("bos_token_id") or c.integers("bos_token_id") or (None,)
    return replace(
        spec,
        checkpoint_precision=precision,
        unquantized_parts=unquantized,
        plain_precision=dtype_precision(text),
        eos_token_ids=tuple(eos),
        bos_token_id=bos[0],
        source="config.json",
    )


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model: itself, or the `text_config` of a multimodal wrapper."""
    for key in ("text_config", "llm_config", "language_config"):
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            merged = dict(inner)
            # A wrapper may state these outside only.
            for shared in ("tie_word_embeddings", "torch_dtype", "dtype"):
                if merged.get(shared) is None and config.get(shared) is not None:
                    merged[shared] = config[shared]
            return language_config(merged)
    return config
