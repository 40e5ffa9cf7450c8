"""Command-line options made from `LoadOptions`, so that every verb of `headrace bench` takes the same ones."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import typer

from headrace.bench.load_options import LoadOptions

PANEL = "Traffic"


def load_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a command with a parameter `load: LoadOptions` into one with an option per field in its place."""

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        values = {f.name: given.pop(f.name) for f in fields(LoadOptions)}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return command(load=LoadOptions(**values), **given)

    inner = inspect.signature(command, eval_str=True)
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in inner.parameters.values() if p.name != "load"]
    parameters = [*own, *(_parameter(name) for name in typing.get_type_hints(LoadOptions))]
    run.__signature__ = inner.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _parameter(name: str) -> inspect.Parameter:
    hint = typing.get_type_hints(LoadOptions, include_extras=True)[name]
    kind, text = hint.__origin__, hint.__metadata__[0]
    default: Any = next(f.default for f in fields(LoadOptions) if f.name == name)
    flag = name.replace("_", "-")
    info: dict[str, Any] = {"help": text, "rich_help_panel": PANEL}
    if kind == tuple[str, ...]:
        kind, default, info["show_default"] = list[str], [], False
    elif isinstance(kind, types.UnionType):
        info["show_default"] = False
    if name == "api_key":
        info["envvar"] = "OPENAI_API_KEY"
        info["show_envvar"] = False
    names = [f"--{flag}/--no-{flag}"] if kind is bool else [f"--{flag}"]
    annotation: Any = Annotated[kind, typer.Option(*names, **info)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
