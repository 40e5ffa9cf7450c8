"""Documentation that names code, files and options is checked against what exists."""

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
DOTTED = re.compile(r"`(headrace(?:\.\w+)+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
NAMED_FILE = re.compile(r"`((?:benchmarks|docs|native|scripts|src|tests)/[\w./-]*[\w])/?`")
COMMAND = re.compile(r"\bheadrace ((?:[a-z]+)(?: [a-z]+)?)((?:\\\n|[^\n`|#])*)")
OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]*")


def resolve(name: str) -> object:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_dotted_names_exist(page: Path) -> None:
    for name in sorted(set(DOTTED.findall(page.read_text()))):
        resolve(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_files_exist(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    assert [name for name in NAMED_FILE.findall(page.read_text()) if not (ROOT / name).exists()] == []


@cache
def options_of(verb: str) -> dict[str, set[str]]:
    """Options by the words of a command line: those of a verb, or of each of its subcommands."""
    from typer.main import get_command

    from headrace.cli.main import build

    def options(command: Any) -> set[str]:
        return {name for p in command.params for name in (*p.opts, *p.secondary_opts)}

    command: Any = get_command(build(verb))
    command = command.commands.get(verb, command) if hasattr(command, "commands") else command
    inner = getattr(command, "commands", {})
    return {f"{verb} {name}": options(c) for name, c in inner.items()} or {verb: options(command)}


def unknown_options(text: str) -> list[str]:
    """Options of `headrace` command lines in `text` that the command does not have."""
    from headrace.cli.main import verbs

    found = []
    for words, rest in COMMAND.findall(text):
        verb = words.split()[0]
        if verb in verbs():
            known = options_of(verb)
            name = words if words in known else verb
            found += [f"{name} {option}" for option in OPTION.findall(rest) if option not in known.get(name, set())]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_options_of_commands_exist(page: Path) -> None:
    assert unknown_options(page.read_text()) == []


def test_an_option_that_is_gone_is_found() -> None:
    assert unknown_options("    headrace plan fit m --gpu g --gone 1\n") == ["plan fit --gone"]
    assert unknown_options("`headrace serve m --port 1 \\\n    --gone`") == ["serve --gone"]


def test_a_name_that_is_gone_is_found() -> None:
    with pytest.raises((ModuleNotFoundError, AttributeError)):
        resolve("headrace.control.scheduler.Scheduler.no_such_method")
