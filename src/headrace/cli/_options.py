"""Command-line options made from `EngineConfig`, so that a new field is an option of every verb that starts an engine."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any

import typer

from headrace.base.errors import InvalidInput
from headrace.spec.config import EngineConfig

PANEL = "Engine"


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a command with a parameter `config: EngineConfig` into one with MODEL and an option per field in its place."""

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        values = {f.name: given.pop(f.name) for f in fields(EngineConfig)}
        values["options"] = tuple(_pair(text) for text in values["options"])
        return command(config=EngineConfig(**values), **given)

    inner = inspect.signature(command, eval_str=True)
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in inner.parameters.values() if p.name != "config"]
    made = [_parameter(f.name) for f in fields(EngineConfig)]
    parameters = [*made[:1], *own, *made[1:]]
    run.__signature__ = inner.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _parameter(name: str) -> inspect.Parameter:
    hint = typing.get_type_hints(EngineConfig, include_extras=True)[name]
    kind, text = hint.__origin__, hint.__metadata__[0]
    default = next(f.default for f in fields(EngineConfig) if f.name == name)
    info: Any
    if default is MISSING:
        info = typer.Argument(help=text, show_default=False)
        default = inspect.Parameter.empty
    elif name == "options":
        kind, default = list[str], []
        info = typer.Option("--option", help=text, rich_help_panel=PANEL, show_default=False)
    else:
        flag = name.replace("_", "-")
        names = [f"--{flag}/--no-{flag}"] if kind is bool else [f"--{flag}"]
        optional = isinstance(kind, types.UnionType)
        info = typer.Option(*names, help=text, rich_help_panel=PANEL, show_default=not optional)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info], default=default)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInput(f"--option takes NAME=VALUE, not {text!r}", field="options")
    return name, value
