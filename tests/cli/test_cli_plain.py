"""The quick reader of plain command lines against typer, which has the last word."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import typing
from collections.abc import Callable
from dataclasses import MISSING
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import InvalidInput
from headrace.cli._declared import Command, Parameter, of_fields
from headrace.cli._plain import _own, read

VERBS = ("generate", "serve", "chat")
TEXTS = ("x", "-", "--prompt", "two words", "", "a=b", "=", "7=1.5", "é", "--", "None")
NUMBERS = (
    "0",
    "1",
    "-1",
    "007",
    "1_000",
    " 3",
    "+4",
    "1.0",
    "1.5",
    ".5",
    "1e2",
    "1E2",
    "nan",
    "inf",
    "x",
    "",
    "9" * 30,
)


def command(verb: str) -> Command:
    return importlib.import_module(f"headrace.cli.{verb}").COMMAND


def parameters(of: Command) -> list[Parameter]:
    return [*_own(of), *(p for fields in of.panels.values() for _, p in of_fields(fields))]


def by_typer(of: Command, arguments: list[str]) -> dict[str, Any] | None:
    """What typer would call the command with; None if it refuses the line."""
    import typer

    from headrace.cli._options import add

    called: list[dict[str, Any]] = []

    @functools.wraps(of.run)
    def record(**given: Any) -> None:
        called.append(given)

    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    add(app, "verb", Command(record, of.panels))
    try:
        app(arguments, standalone_mode=False)
    except InvalidInput:
        raise
    except Exception:  # click's and typer's many
        return None
    return called[0] if called else None


@st.composite
def lines(draw: st.DrawFn, verb: str) -> list[str]:
    """A line of known options, most with values of their kind, in any order, with the verb's arguments among them."""
    parts: list[list[str]] = [["model"]] if draw(st.integers(0, 9)) else []
    if verb == "generate" and draw(st.integers(0, 9)):
        parts.append(["--prompt", "hello"])
    for p in draw(st.lists(st.sampled_from(parameters(command(verb))), max_size=5)):
        kind = p.element or p.kind
        values = NUMBERS if kind in (int, float, int | None, float | None) else TEXTS
        words = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else values
        value = draw(st.sampled_from(words))
        if p.flag is None:
            parts.append([value])
        elif p.kind is bool:
            parts.append([draw(st.sampled_from([f for f in (p.flag, p.off_flag) if f]))])
        else:
            parts.append([f"{p.flag}={value}"] if draw(st.booleans()) else [p.flag, value])
    return [word for part in draw(st.permutations(parts)) for word in part]


@pytest.mark.parametrize("verb", VERBS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_line_that_is_read_quickly_is_read_as_typer_reads_it(verb: str, data: st.DataObject) -> None:
    of, line = command(verb), data.draw(lines(verb))
    quick = outcome(read, of, line)
    if quick is not None:
        assert outcome(by_typer, of, line) == quick


def outcome(reader: Callable[[Command, list[str]], dict[str, Any] | None], of: Command, line: list[str]) -> Any:
    """What a reader makes of a line, or the words in which the settings themselves refuse it."""
    try:
        return reader(of, line)
    except InvalidInput as error:
        return str(error)


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_given_once_is_plain(verb: str) -> None:
    of = command(verb)
    line, skipped = ["smollm2-135m"], {"kv_bytes", "step_target_ms", "model"}  # one of two that exclude each other
    for p in parameters(of):
        if p.name in skipped:
            continue
        plain = {int: "1", float: "0.5", int | None: "1", float | None: "0.5"}.get(p.element or p.kind, "1=2")
        if typing.get_origin(p.kind) is typing.Literal:
            plain = typing.get_args(p.kind)[-1]
        line += [p.off_flag or p.flag or ""] if p.kind is bool else [p.flag or "", plain]
    found = read(of, line)
    assert found is not None
    assert found == by_typer(of, line)
    assert all(found[p.name] != p.default for p in _own(of) if p.default is not MISSING)


@pytest.mark.parametrize(
    "line",
    [
        ["--help"],
        ["model", "--help"],
        ["model"],
        ["--prompt", "x"],
        ["model", "more", "--prompt", "x"],
        ["model", "--prompt"],
        ["model", "--prompt", "x", "--no-such"],
        ["model", "--prompt", "x", "--seed", "one"],
        ["model", "--prompt", "x", "--chat=yes"],
        ["model", "--prompt", "x", "--no-chat"],
        ["model", "--prompt", "x", "--load-format", "other"],
        ["--", "model", "--prompt", "x"],
    ],
)
def test_what_is_not_plain_is_left_to_typer(line: list[str]) -> None:
    assert read(command("generate"), line) is None
    assert read(command("generate"), ["model", "--prompt", "x"]) is not None


def test_a_plain_line_loads_neither_typer_nor_asyncio() -> None:
    code = (
        "import functools, sys; from headrace.cli import main, generate as g\n"
        "run = functools.wraps(g.generate)(lambda **given: print(given['prompt']))\n"
        "g.COMMAND = g.COMMAND._replace(run=run)\n"
        "main.main(['generate', 'model', '--prompt', 'x'])\n"
        "print(sorted({'typer', 'rich', 'pydantic', 'asyncio', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['x']\n[]\n"
