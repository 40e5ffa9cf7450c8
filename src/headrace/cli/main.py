"""The `headrace` command. Each other module of this folder is one verb and exports `register(app)`."""

import ast
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from typing import Annotated

import typer

import headrace
import headrace.cli
from headrace.base.errors import HeadraceError, InvalidInput


def verbs() -> list[str]:
    """Names of all verbs, found by file, nothing imported."""
    return sorted(
        m.name.replace("_", "-")
        for m in pkgutil.iter_modules(headrace.cli.__path__)
        if m.name != "main" and not m.name.startswith("_")
    )


def build(verb: str | None) -> typer.Typer:
    """The application with the one verb asked for, or (for help and for mistyped names) with a list of all of them."""
    app = typer.Typer(
        name="headrace",
        help="LLM inference with evidence: plan, serve, measure and advise.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    def say_version(wanted: bool) -> None:
        if wanted:
            typer.echo(headrace.__version__)
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.", callback=say_version, is_eager=True)
        ] = False,
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
    found = importlib.util.find_spec(_module(verb))
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
        build(verb)(arguments)
    except InvalidInput as error:
        sys.exit(_say(error, 2))
    except HeadraceError as error:
        sys.exit(_say(error, 1))
    except BrokenPipeError:  # the reader of our output is gone (`headrace … | head`)
        sys.stderr.close()
        sys.exit(1)


def _say(error: HeadraceError, code: int) -> int:
    print(f"headrace: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
