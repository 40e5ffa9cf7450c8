"""Traffic, one file each. A workload exports `WORKLOAD`; its sessions are a function of options, seed and salt alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from headrace.base.errors import InvalidInput
from headrace.base.registry import Registry
from headrace.bench.traffic import IntRange, WorkloadKind

WORKLOADS = Registry("headrace.bench.workloads", "WORKLOAD", kind="workload")


def find_workload(name: str) -> WorkloadKind:
    """The workload called `name`; an unknown name is an `InvalidInput` that lists the known ones."""
    try:
        kind: WorkloadKind = WORKLOADS.get(name)
    except InvalidInput as error:
        raise InvalidInput(error.message, field="--workload", remedy=error.remedy) from None
    return kind


def workload_options(kind: WorkloadKind, given: Mapping[str, str]) -> Any:
    """The workload's options with the `given` texts parsed into them; an option it does not have is refused."""
    hints = get_type_hints(kind.options)
    known = {f.name for f in fields(kind.options)}
    values: dict[str, Any] = {}
    for name, text in given.items():
        key = name.replace("-", "_")
        if key not in known:
            listed = ", ".join(sorted(n.replace("_", "-") for n in known)) or "none"
            raise InvalidInput(
                f"this workload has no option {name!r}", field=f"--set {name}", remedy=f"it has: {listed}"
            )
        values[key] = _parse(text, hints[key], f"--set {name}")
    return kind.options(**values)


def _parse(text: str, hint: Any, field: str) -> Any:
    if hint is IntRange:
        return IntRange.parse(text, field)
    try:
        value = hint(text)
    except ValueError:
        raise InvalidInput(f"expected {hint.__name__}, got {text!r}", field=field) from None
    if hint in (int, float) and value < 0:
        raise InvalidInput(f"must not be negative, got {text}", field=field)
    return value
