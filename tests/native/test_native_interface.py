"""The installed extension and the package that calls it are of the same making, and a stale one is said, not a traceback."""

from __future__ import annotations

import hashlib
import re
import sys
import types

import headrace_native

from headrace.engine.executors.native import BACKEND, INTERFACE, not_usable
from headrace.spec.config import EngineConfig

SIGNATURES = "92e724041a9d4315"
"""Of interface 2: whoever changes what the extension offers raises `INTERFACE` on both sides and renews this."""

ARGUMENT = re.compile(r"(\w+): ")


def signatures() -> str:
    """Names and their arguments' names, however the binding library writes types."""
    found = []
    for name in sorted(headrace_native.__all__):
        thing = getattr(headrace_native, name)
        members = vars(thing).items() if isinstance(thing, type) else ((name, thing),)
        for member, value in sorted(members, key=lambda pair: pair[0]):
            if isinstance(value, property):
                found.append(f"{name}.{member}")
            for line, *_ in getattr(value, "__nb_signature__", ()):
                arguments = ARGUMENT.findall(line)
                found.append(f"{name}.{member} {arguments}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def test_both_sides_name_one_interface():
    assert headrace_native.INTERFACE == INTERFACE
    assert not_usable() is None


def test_a_changed_signature_takes_a_new_interface():
    assert signatures() == SIGNATURES


def test_an_extension_of_another_version_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(headrace_native, "INTERFACE", 1)
    reason = BACKEND.unavailable(None, EngineConfig(model="x"))
    assert "interface 1, needed 2" in reason
    assert "make setup" in reason


def test_an_extension_that_does_not_load_is_named_with_the_remedy(monkeypatch):
    broken = types.ModuleType("headrace_native")
    broken.__spec__ = headrace_native.__spec__
    monkeypatch.setitem(sys.modules, "headrace_native", None)
    monkeypatch.setattr("headrace.engine.executors.native.find_spec", lambda _: broken.__spec__)
    assert "does not load" in BACKEND.unavailable(None, EngineConfig(model="x"))
