"""What is measured: a URL, or an engine that is started, warmed, flushed and stopped. One file per engine.

A target file exports `TARGET`, an `EngineTarget`; how the engine is started stands in its facts file under
`spec/engines`, only what a table cannot say (where a model's file is, two processes instead of one) is code.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.base.errors import InvalidInput
from headrace.base.registry import Registry
from headrace.spec.engine_serving import LaunchFacts, launch_facts

TARGETS = Registry("headrace.bench.targets", "TARGET", kind="target")


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """`NAME[:setting=value,…]` or a URL, as the user wrote it. `settings` also takes `bin` (the program), `args` and
    `env.NAME`."""

    name: str
    settings: Mapping[str, str]
    url: str = ""

    @property
    def label(self) -> str:
        """Short text that tells two targets apart."""
        return self.url or ":".join(filter(None, (self.name, ",".join(f"{k}={v}" for k, v in self.settings.items()))))


def parse_target(text: str) -> TargetSpec:
    """Read `http://…` or `NAME[:setting=value[,setting=value…]]`."""
    if text.startswith(("http://", "https://")):
        return TargetSpec("url", {}, text)
    name, _, rest = text.partition(":")
    settings: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise InvalidInput(f"expected setting=value, got {part!r}", field="--target")
        settings[key.strip().replace("-", "_")] = value.strip()
    return TargetSpec(name, settings)


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """A program to start, and what is added to its environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """An engine that can be started here. `engine`: its facts file; `model_path`: turns a model's name into what the
    engine takes; `defaults`: settings used where the user gives none."""

    engine: str
    model_path: Callable[[str], str] = lambda model: model
    defaults: Mapping[str, str] = field(default_factory=dict)

    @property
    def facts(self) -> LaunchFacts:
        return launch_facts(self.engine)

    def flush_calls(self, settings: Mapping[str, str]) -> tuple[str, ...]:
        """METHOD PATH of every call that empties the prefix cache; empty where the engine has none."""
        facts = self.facts
        if "{slot}" not in facts.flush:
            return (facts.flush,) if facts.flush else ()
        slots = int({**self.defaults, **settings}.get("slots", "1"))
        return tuple(facts.flush.format(slot=slot) for slot in range(slots))

    def launch_line(self, model: str, port: int, settings: Mapping[str, str]) -> LaunchLine:
        """The command that serves `model` on 127.0.0.1:`port`. A setting that the engine does not have is refused."""
        facts, values = self.facts, {**self.defaults, **settings}
        program, extra = values.pop("bin", ""), values.pop("args", "")
        env = {name[4:]: values.pop(name) for name in list(values) if name.startswith("env.")}
        fill = {
            "model": self.model_path(model), "port": str(port), "python": sys.executable,
            "temporary": tempfile.gettempdir() + os.sep,
        }  # fmt: skip
        argv = [part.format(**fill) for part in facts.command]
        if program:
            argv[0] = program
        for name, value in values.items():
            flag = (
                facts.flags.get(name)
                if f"{name}.on" not in facts.flags
                else facts.flags.get(f"{name}.{_switch(value)}")
            )
            if flag is None:
                known = sorted({key.partition(".")[0] for key in facts.flags} | {"bin", "args", "env.NAME"})
                raise InvalidInput(f"{self.engine} has no setting {name!r}", field="--target", remedy=", ".join(known))
            whole = _product(values.get("context", ""), values.get("slots", "1")) if name == "context" else ""
            argv += [part.format(value=value, context_of_all_slots=whole) for part in flag]
        return LaunchLine((*argv, *extra.split()), {**facts.env, **env})


def find_target(name: str) -> EngineTarget:
    """The target called `name`; an unknown name lists the known ones."""
    try:
        target: EngineTarget = TARGETS.get(name)
    except InvalidInput as error:
        raise InvalidInput(error.message, field="--target", remedy=f"a URL, or {error.remedy}") from None
    return target


def installed(line: LaunchLine) -> bool:
    """Whether the program of a launch line is there."""
    return shutil.which(line.argv[0], path=os.environ.get("PATH")) is not None


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _switch(value: str) -> str:
    if value not in ("on", "off"):
        raise InvalidInput(f"expected on or off, got {value!r}", field="--target")
    return value


def _product(context: str, slots: str) -> str:
    try:
        return str(int(context) * int(slots))
    except ValueError:
        raise InvalidInput("context and slots must be whole numbers", field="--target") from None
