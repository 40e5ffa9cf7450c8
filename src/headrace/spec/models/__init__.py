"""The model catalog: geometries of well-known models, so that planning needs no download and no network.

One JSON file per geometry: the model's own `config.json`, its official parameter count with the source, the family it
belongs to (calibration is validated by leaving whole families out) and every name it goes by.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from headrace.base.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One known geometry.

    `parameters` is the official count of the whole checkpoint; `outside_text` of them (vision towers) are loaded but no
    part of the language model that `config` describes. `exact` says whether the count is exact or a rounded figure.
    """

    id: str
    family: str
    aliases: tuple[str, ...]
    config: Mapping[str, Any]
    parameters: int
    exact: bool
    parameters_source: str
    config_source: str
    active_parameters: int | None = None
    outside_text: int = 0
    note: str = ""


def fold(name: str) -> str:
    """A name as it is compared: lower case, letters and digits only, without the organisation."""
    return re.sub(r"[^a-z0-9.]", "", name.rsplit("/", 1)[-1].lower())


@cache
def catalog() -> Mapping[str, CatalogModel]:
    """Every shipped geometry by id."""
    found: dict[str, CatalogModel] = {}
    for file in sorted(resources.files(__package__).iterdir(), key=lambda f: f.name):
        if file.name.endswith(".json"):
            raw = json.loads(file.read_text())
            found[raw["id"]] = CatalogModel(
                id=raw["id"],
                family=raw["family"],
                aliases=tuple(raw["aliases"]),
                config=raw["config"],
                parameters=raw["parameters"],
                exact=raw["parameters_exact"],
                parameters_source=raw["parameters_source"],
                config_source=raw["config_source"],
                active_parameters=raw.get("active_parameters"),
                outside_text=raw.get("outside_text_parameters", 0),
                note=raw.get("note", ""),
            )
    return found


@cache
def _index() -> Mapping[str, str]:
    index: dict[str, str] = {}
    for model in catalog().values():
        for name in (model.id, *model.aliases):
            index.setdefault(fold(name), model.id)
    return index


def spellings(model: CatalogModel) -> Iterator[str]:
    """Every name under which an entry is found."""
    yield model.id
    yield from model.aliases


_VARIANT = re.compile(
    r"[-_ .](fp8|fp4|nvfp4|mxfp4|bf16|fp16|int4|int8|awq|gptq|gguf|quantized|w8a8|w4a16|w8a16|dynamic|static|block|"
    r"[48]bit|nf4|bnb|unsloth|qat|q\d_[\dk](?:_[sml])?|w[-_]mxfp4[-_]a[-_]fp8|gptq[-_]\db|ptpc|per[-_]?(?:tensor|channel|token)|g\d+|\d+g|kv|fp[48][-_]v\d|hf[-_]quant|preview|autoround|instruct|"
    r"it|chat|base|hf|thinking|\d{4})$|\s*\([^()]*\)$",
    re.IGNORECASE,
)
"""Endings that name a precision, a tuning or a date, none of which changes the geometry."""
_VERSION = re.compile(r"(?<=\d)_(?=\d(?![\db.]))")
"""Some hub ids write the point of a version so: `Llama-3_1`; a size that follows (`llama_3_1_8b`) is none."""
_AROUND = re.compile(r"^(?:https?://(?:www\.)?huggingface\.co/|hf://)|(?:@[\w./-]+|:\w+|/+)$")
"""What is written around a name and says where it is from: a hub's address, a revision, a tag, a last slash."""


def known(name: str) -> CatalogModel | None:
    """The entry called `name`, or None.

    An id or a hub id; case, punctuation and organisation do not matter, and endings such as `-FP8-dynamic`, `(FP8)` or
    `-Instruct-2507` are dropped one by one until something matches: they change the weights, not the geometry.
    """
    name = _AROUND.sub("", name.strip())
    while True:
        spelt = _VERSION.sub(".", name)
        tries = (name, spelt, re.sub(r"(?i)(?<=llama)[-_ ]?v(?=\d)", "-", spelt))
        key = next((found for each in tries if (found := _index().get(fold(each)))), None)
        if key is not None:
            return catalog()[key]
        shorter = _VARIANT.sub("", name)
        if shorter == name:
            return None
        name = shorter


def find(name: str) -> CatalogModel:
    """Like `known`, but an unknown name is an `InvalidInput` that suggests the closest ones."""
    model = known(name)
    if model is not None:
        return model
    near = difflib.get_close_matches(fold(name), _index(), n=4, cutoff=0.5)
    hint = ", ".join(dict.fromkeys(_index()[n] for n in near)) or "those that `headrace plan models` lists"
    raise InvalidInput(
        f"unknown model {name!r}", field="model", remedy=f"give a path to a config.json, or one of: {hint}"
    )
