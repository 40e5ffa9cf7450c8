"""Reading a plain command line: known options, each with a well-formed value.

Anything else – a request for help, a mistake, a rare way to write a value – is left to typer, which takes longer to import
than all the rest of a start. Both take the same options from the same declarations; where this reads a line, typer would
have read the same.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from headrace.cli._declared import Command, Option, Parameter, field_value, of_fields

_INTEGER = re.compile(r"-?[0-9]{1,18}")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?(e-?[0-9]{1,2})?")


class _Unclear(Exception):
    """Not plain."""


def read(command: Command, arguments: Sequence[str]) -> dict[str, Any] | None:
    """The keyword arguments for `command.run`; None if the line is not plain. InvalidInput as the dataclasses raise it."""
    own = _own(command)
    fields = {name: of_fields(given) for name, given in command.panels.items()}
    try:
        values = _values([*own, *(p for declared in fields.values() for _, p in declared)], arguments)
    except _Unclear:
        return None
    found = {p.name: values[p.name] for p in own}
    for name, given in reversed(tuple(command.panels.items())):  # so that of two mistakes the same is named as by typer
        made = {field.name: field_value(p.kind, p.name, values[p.name]) for field, p in fields[name]}
        found[name] = given.dataclass(**made)
    return found


def _own(command: Command) -> list[Parameter]:
    """The command's own parameters, panels left out."""
    hints = typing.get_type_hints(command.run, include_extras=True)
    found = []
    for p in inspect.signature(command.run).parameters.values():
        if p.name in command.panels:
            continue
        kind, option = hints[p.name].__origin__, hints[p.name].__metadata__[0]
        default = MISSING if p.default is p.empty else p.default
        element = typing.get_args(kind)[0] if typing.get_origin(kind) is list else None
        found.append(Parameter(p.name, option.flag or "--" + p.name.replace("_", "-"), kind, element, default, option))
    return found


def _values(parameters: Sequence[Parameter], arguments: Sequence[str]) -> dict[str, Any]:
    flags = {p.flag: p for p in parameters if p.flag is not None}
    switches = {p.flag: (p, True) for p in flags.values() if p.kind is bool}
    switches |= {p.off_flag: (p, False) for p in flags.values() if p.off_flag is not None}
    places = iter([p for p in parameters if p.flag is None])
    found: dict[str, Any] = {}
    rest = iter(arguments)
    for word in rest:
        if word in switches:
            switch, on = switches[word]
            found[switch.name] = on
            continue
        flag, equals, text = word.partition("=")
        if (p := flags.get(flag)) is not None and p.kind is not bool:
            value = _converted(p.element or p.kind, text if equals else _next(rest), p.option)
            found[p.name] = [*found.get(p.name, []), value] if p.element is not None else value
        elif word.startswith("-") or (place := next(places, None)) is None:
            raise _Unclear
        else:
            found[place.name] = _converted(place.kind, word, place.option)
    for p in parameters:
        if p.name not in found:
            if p.default is MISSING:
                raise _Unclear
            found[p.name] = p.default
    return found


def _next(rest: Iterator[str]) -> str:
    word = next(rest, None)
    if word is None:
        raise _Unclear
    return word


def _converted(kind: Any, text: str, option: Option) -> Any:
    """A value of `kind`, of which there are few: text, a path, a number, one of several words, or any of these or None."""
    if isinstance(kind, types.UnionType):
        (kind,) = [k for k in typing.get_args(kind) if k is not type(None)]
    if kind is str:
        return text
    if kind is Path and text:
        return Path(text)
    if kind is int and _INTEGER.fullmatch(text):
        value = int(text)
        low, high = option.least, option.most
        if (low is None or value >= low) and (high is None or value <= high):
            return value
    if kind is float and _NUMBER.fullmatch(text):
        return float(text)
    if typing.get_origin(kind) is typing.Literal and text in typing.get_args(kind):
        return text
    raise _Unclear
