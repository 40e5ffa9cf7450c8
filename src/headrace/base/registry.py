"""A file is a registration: a `Registry` finds the modules of one folder by name and imports one when it is asked for."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

from headrace.base.errors import InvalidInput


class Registry:
    """Plugins of one kind: each module of `package` (not starting with `_`) exports `attribute`.

    Listing names imports nothing but the package itself, so a registry of torch code can be listed without torch.
    File `foo_bar.py` is known as `foo-bar`; both spellings are accepted.
    """

    def __init__(self, package: str, attribute: str, *, kind: str) -> None:
        self.package = package
        self.attribute = attribute
        self.kind = kind

    def names(self) -> list[str]:
        """All registered names, sorted."""
        path = importlib.import_module(self.package).__path__
        return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(path) if not m.name.startswith("_"))

    def get(self, name: str) -> Any:
        """Import and return the entry called `name`; an unknown name is an `InvalidInput` that lists the known ones."""
        if name.replace("_", "-") not in self.names():
            raise InvalidInput(
                f"unknown {self.kind} {name!r}", field=self.kind, remedy="choose one of: " + ", ".join(self.names())
            )
        module = importlib.import_module(f"{self.package}.{name.replace('-', '_')}")
        return getattr(module, self.attribute)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name in self.names():
            yield name, self.get(name)
