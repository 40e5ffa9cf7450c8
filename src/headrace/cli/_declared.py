"""What a verb takes, said without typer, so that a plain command line runs without importing it (`_plain`).

A parameter's annotation carries an `Option`; a parameter that is a dataclass stands for an option per field.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from headrace.base.errors import InvalidInput
from headrace.control.params import SamplingParams
from headrace.spec.config import EngineConfig


class Option(NamedTuple):
    """`flag`: where it is not the parameter's name. `least` and `most` bound an integer."""

    help: str
    flag: str | None = None
    least: int | None = None
    most: int | None = None


class Fields(NamedTuple):
    """The fields of `dataclass` as options of one `panel` of the help; `names` renames some."""

    dataclass: type
    panel: str
    names: Mapping[str, str] = {}


class Command(NamedTuple):
    """A function with keyword parameters, and those of them that stand for the fields of a dataclass."""

    run: Callable[..., None]
    panels: Mapping[str, Fields]


class Parameter(NamedTuple):
    """One option (one argument, if `flag` is None) of a command. `element`: what each use gives, if it may be repeated."""

    name: str
    flag: str | None
    kind: Any
    element: Any
    default: Any
    option: Option
    panel: str | None = None

    @property
    def off_flag(self) -> str | None:
        """What turns off a switch that is on by default."""
        return f"--no-{self.flag[2:]}" if self.flag and self.kind is bool and self.default else None


ENGINE = Fields(EngineConfig, "Engine", {"seed": "dummy_seed"})
"""An engine's options; `--seed` is left to sampling."""
SAMPLING = Fields(SamplingParams, "Sampling")

GenerationConfig = Annotated[
    bool, Option("Take sampling parameters that are not set from the model's generation_config.json or GGUF metadata.")
]
ChatTemplateFile = Annotated[
    Path | None, Option("Jinja file to use instead of the model's chat template.", "--chat-template")
]


def of_fields(given: Fields) -> list[tuple[Field[Any], Parameter]]:
    """Each field with the option it becomes: named, typed, described and defaulted as the field is."""
    hints = typing.get_type_hints(given.dataclass, include_extras=True)
    return [(field, _of_field(field, hints[field.name], given)) for field in fields(given.dataclass)]


def _of_field(field: Field[Any], hint: Any, given: Fields) -> Parameter:
    kind, text = hint.__origin__, hint.__metadata__[0]
    name = given.names.get(field.name, field.name)
    if field.default is MISSING:
        return Parameter(name, None, kind, None, MISSING, Option(text), given.panel)
    flag, element = "--" + name.replace("_", "-"), _element(kind)
    if element is not None and not flag.endswith("bias"):
        flag = flag.removesuffix("s")  # given once per value
    default = [] if element is not None else field.default
    return Parameter(name, flag, kind, element, default, Option(text), given.panel)


def field_value(kind: Any, name: str, given: Any) -> Any:
    """A field's value from what its option was given."""
    if _element(kind) is None:
        return given
    if kind == tuple[tuple[str, str], ...]:
        return tuple(pair(name, text) for text in given)
    if Mapping in [typing.get_origin(option) for option in typing.get_args(kind)]:
        pairs = [pair(name, text) for text in given]
        try:
            return {int(key): float(number) for key, number in pairs}
        except ValueError as error:
            raise InvalidInput(f"takes ID=NUMBER: {error}", field=name) from None
    return tuple(given)


def pair(name: str, text: str) -> tuple[str, str]:
    """NAME=VALUE as given to option `name`; InvalidInput if it is not."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InvalidInput(f"takes NAME=VALUE, not {text!r}", field=name)
    return key, value


def _element(kind: Any) -> type | None:
    """What a repeatable option takes each time; None if the option takes one value."""
    union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    for option in typing.get_args(kind) if union else (kind,):
        origin = typing.get_origin(option)
        if origin is Sequence:
            element: type = typing.get_args(option)[0]
            return element
        if origin in (Mapping, tuple):
            return str
    return None
