"""typer's form of what verbs take: options made from dataclasses, and from what `_declared` says."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from typing import Annotated, Any, get_args, get_origin

import typer

from headrace.cli._declared import ENGINE, Command, Fields, Option, Parameter, field_value, of_fields, pair

__all__ = ["add", "engine_options", "options_of", "pair"]


def options_of(
    dataclass: type, parameter: str, *, panel: str, names: Mapping[str, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a command's parameter, an instance of `dataclass`, by an option per field (an argument, if it has no
    default), named, typed, described and defaulted as the field is, or as `names` says. Its own checks see the values
    together."""
    return functools.partial(_replace, parameter, Fields(dataclass, panel, names or {}))


def add(app: typer.Typer, name: str, command: Command) -> None:
    """Make a declared command a verb of `app`."""
    run = command.run
    for parameter, given in command.panels.items():
        run = _replace(parameter, given, run)  # the last is made, and so checked, first
    app.command(name=name)(run)


def _replace(parameter: str, given: Fields, command: Callable[..., Any]) -> Callable[..., Any]:
    declared = of_fields(given)

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        made = {field.name: field_value(p.kind, p.name, values.pop(p.name)) for field, p in declared}
        return command(**{parameter: given.dataclass(**made)}, **values)

    inner = inspect.signature(command, eval_str=True)
    own = [p.replace(annotation=_annotation(p.annotation)) for name, p in inner.parameters.items() if name != parameter]
    signature = inner.replace(parameters=[*own, *(_typed(p) for _, p in declared)])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return run


def _annotation(annotation: Any) -> Any:
    """A parameter's annotation with typer's word for what it declares."""
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, said = get_args(annotation)
    if not isinstance(said, Option):
        return annotation
    flags = [said.flag] if said.flag else []
    return Annotated[kind, typer.Option(*flags, help=said.help, min=said.least, max=said.most)]


def _typed(p: Parameter) -> inspect.Parameter:
    kind: Any = p.kind
    default: Any = inspect.Parameter.empty
    info: Any
    if p.default is MISSING:
        info = typer.Argument(help=p.option.help, show_default=False)
    else:
        if p.element is not None:
            kind = list[p.element]  # type: ignore[name-defined]
        default = p.default
        flag = f"{p.flag}/{p.off_flag}" if p.off_flag else p.flag
        shown = default not in (None, [], False)
        info = typer.Option(flag, help=p.option.help, rich_help_panel=p.panel, show_default=shown)
    return inspect.Parameter(p.name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info], default=default)


engine_options = options_of(ENGINE.dataclass, "config", panel=ENGINE.panel, names=ENGINE.names)
"""An engine's options for a command with `config: EngineConfig`; `--seed` is left to sampling."""
