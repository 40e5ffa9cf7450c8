"""Command-line options made from dataclasses, so that a new field is an option of every verb that takes the class."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.base.errors import InvalidInput
from headrace.control.params import SamplingParams
from headrace.spec.config import EngineConfig

ChatTemplateFile = Annotated[
    Path | None, typer.Option("--chat-template", help="Jinja file to use instead of the model's chat template.")
]


def options_of(
    dataclass: type, parameter: str, *, panel: str, names: Mapping[str, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a command's parameter, an instance of `dataclass`, by an option per field (an argument, if it has no
    default), named, typed, described and defaulted as the field is, or as `names` says. Its own checks see the values
    together."""
    renamed = names or {}

    def replace(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = typing.get_type_hints(dataclass, include_extras=True)
        made = {field.name: _parameter(field, hints[field.name]) for field in fields(dataclass)}

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            values = {
                name: _value(hints[name].__origin__, made[name].name, given.pop(made[name].name)) for name in made
            }
            return command(**{parameter: dataclass(**values)}, **given)

        inner = inspect.signature(command, eval_str=True)
        own = [p for name, p in inner.parameters.items() if name != parameter]
        signature = inner.replace(parameters=[*own, *made.values()])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return run

    def _parameter(field: Field[Any], hint: Any) -> inspect.Parameter:
        kind, text = hint.__origin__, hint.__metadata__[0]
        name = renamed.get(field.name, field.name)
        default: Any = field.default
        info: Any
        if default is MISSING:
            info, default = typer.Argument(help=text, show_default=False), inspect.Parameter.empty
        else:
            flag = "--" + name.replace("_", "-")
            if (element := _element(kind)) is not None:
                if not flag.endswith("bias"):
                    flag = flag.removesuffix("s")  # given once per value
                kind, default = list[element], []  # type: ignore[valid-type]
            names = [f"{flag}/--no-{flag[2:]}"] if kind is bool and default else [flag]
            info = typer.Option(*names, help=text, rich_help_panel=panel, show_default=default not in (None, [], False))
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info], default=default
        )

    return replace


engine_options = options_of(EngineConfig, "config", panel="Engine", names={"seed": "dummy_seed"})
"""An engine's options for a command with `config: EngineConfig`; `--seed` is left to sampling."""

sampling_options = options_of(SamplingParams, "params", panel="Sampling")
"""Sampling options for a command with `params: SamplingParams`."""


def _element(kind: Any) -> type | None:
    """What a repeatable option takes each time; None if the option takes one value."""
    options = (
        typing.get_args(kind)
        if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
        else (kind,)
    )
    for option in options:
        origin = typing.get_origin(option)
        if origin is Sequence:
            element: type = typing.get_args(option)[0]
            return element
        if origin in (Mapping, tuple):
            return str
    return None


def _value(kind: Any, name: str, given: Any) -> Any:
    """A field's value from what typer made of its option."""
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
