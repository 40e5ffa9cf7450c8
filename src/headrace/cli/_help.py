"""Help as plain text in which every option stands with its whole name: tables of a terminal's width cut names short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_WIDTH = 110


class _Verb(TyperCommand):
    """Options by panel, those without one first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            said = parameter.get_help_record(ctx)
            if said is not None:
                plain = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or plain, []).append(said)
        for name, rows in sections.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl(rows)


class _Verbs(TyperGroup):
    """Verbs with all that they say of themselves."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [
            (name, (command.help or "").partition("\n\n")[0].replace("\n", " "))
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class Verbs(typer.Typer):
    """A typer whose help and mistakes are plain text."""

    def __init__(self, **given: Any) -> None:
        super().__init__(
            cls=_Verbs,
            no_args_is_help=True,
            add_completion=False,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings={"max_content_width": _WIDTH},
            **given,
        )

    def command(self, name: str | None = None, **given: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=_Verb, **given)
