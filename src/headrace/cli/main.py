"""The `headrace` command. Each other module of this folder is one verb and exports `register(app)`."""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import stat
import sys
from typing import TYPE_CHECKING

import headrace
import headrace.cli
from headrace.base.errors import HeadraceError, InvalidInput

if TYPE_CHECKING:
    import typer


def verbs() -> list[str]:
    """Names of all verbs, found by file, nothing imported."""
    return sorted(
        m.name.replace("_", "-")
        for m in pkgutil.iter_modules(headrace.cli.__path__)
        if m.name != "main" and not m.name.startswith("_")
    )


def build(verb: str | None) -> typer.Typer:
    """The application with the one verb asked for, or (for help and for mistyped names) with a list of all of them."""
    import typer

    from headrace.cli._help import Verbs

    app = Verbs(name="headrace", help="LLM inference with evidence: plan, serve and measure.")

    def say_version(wanted: bool) -> None:
        if wanted:
            typer.echo(headrace.__version__)
            raise typer.Exit

    @app.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", help="Print the version and exit.", callback=say_version, is_eager=True
        ),
    ) -> None: ...

    if verb is not None:
        importlib.import_module(_module(verb)).register(app)
    else:
        for name in verbs():
            app.command(name=name, help=_summary(name))(_nothing)
    return app


def _module(verb: str) -> str:
    return f"headrace.cli.{verb.replace('-', '_')}"


def _summary(verb: str) -> str:
    """What a verb's file says about itself in its first line, read without running it."""
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    found = find_spec(_module(verb))
    assert found is not None
    assert found.origin is not None
    line = (ast.get_docstring(ast.parse(Path(found.origin).read_bytes())) or "").partition("\n")[0]
    text = line.rpartition("`: ")[2]
    return text[:1].upper() + text[1:]


def _nothing() -> None:
    """Stands for a verb in the list of verbs; `main` loads the real one when it is the one asked for."""


def main(argv: list[str] | None = None) -> None:
    """Run the command. An expected error is one line on stderr; exit code 2 if the input was wrong, else 1."""
    arguments = sys.argv[1:] if argv is None else argv
    verb = arguments[0] if arguments and arguments[0] in verbs() else None
    try:
        if verb is None or not _run_plain(verb, arguments[1:]):
            build(verb)(arguments)
    except InvalidInput as error:
        sys.exit(_say(error, 2))
    except HeadraceError as error:
        sys.exit(_say(error, 1))
    except BrokenPipeError:  # the reader of our output is gone (`headrace … | head`)
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:  # a path that was given and cannot be read or written, or a full disk
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        wrong = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
        path = _standard_output() if error.filename is None else str(error.filename)
        said = HeadraceError(error.strerror or type(error).__name__, field=path)
        sys.exit(_say(said, 2 if isinstance(error, wrong) else 1))


def _run_plain(verb: str, arguments: list[str]) -> bool:
    """Run the verb without typer if it says what it takes and the line is plain; whether it did."""
    command = getattr(importlib.import_module(_module(verb)), "COMMAND", None)
    if command is None:
        return False
    from headrace.cli._plain import read

    if (given := read(command, arguments)) is None:
        return False
    try:
        command.run(**given)
    except KeyboardInterrupt:
        print("Aborted.", file=sys.stderr)
        sys.exit(1)
    return True


def _standard_output() -> str | None:
    """Its name if it goes where there may be no room: files that we write are named in their errors, a stream is not."""
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or replaced by something that is no file
        return None
    return None if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or sys.stdout.isatty() else "standard output"


def _say(error: HeadraceError, code: int) -> int:
    print(f"headrace: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
