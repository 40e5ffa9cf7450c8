"""Weight formats: a file here is a registration and exports `FORMATS`, the formats of one kind.

Names are those of `headrace.spec.precision`, which knows how many bytes each takes; `w8a8` alone is a way to compute, with
the bytes of `int8`.
"""

from __future__ import annotations

from functools import cache

from headrace.base.errors import InvalidInput
from headrace.base.registry import Registry
from headrace.engine.quant.formats._contract import Format, Packed
from headrace.spec.precision import ALIASES

__all__ = ["FILES", "Format", "Packed", "form", "known", "names"]

FILES = Registry(__name__, "FORMATS", kind="weight format")


@cache
def known() -> dict[str, Format]:
    """All formats by name."""
    return {f.name: f for _, formats in FILES for f in formats}


def names() -> list[str]:
    return sorted(known())


def form(name: str) -> Format:
    """The format called `name`: case, `-` and `_` do not matter, and aliases of `headrace.spec.precision` are known."""
    key = name.strip().lower().replace("-", "_")
    found = known().get(key) or known().get(ALIASES.get(key, key))
    if found is None:
        raise InvalidInput(
            f"unknown weights format {name!r}", field="weights", remedy="choose one of: " + ", ".join(names())
        )
    return found
