"""Lets threads compile kernels side by side, and spares launches a check: what Triton's own way of launching costs.

Triton loads every kernel's launcher as an extension module of one and the same name, and CPython then hands one module
object to all of them: a thread can get the launcher that another has just loaded, which takes other arguments. Under a
name of its own each is a module of its own; the initializer's symbol is that of the name's last part, which stays.

Before each launch Triton compares every global constant that a kernel was compiled with, which takes a microsecond of each: 17 of
the 30 us that launching `_dequantize` takes on the host. Its helpers for sizes may run in kernels too and take two each.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
from types import ModuleType

_numbers = itertools.count()
_lock = threading.Lock()


def load_apart(name: str, path: str) -> ModuleType:
    """The extension module `name` at `path`, as an object that no other load returns."""
    with _lock:
        spec = importlib.util.spec_from_file_location(f"headrace_launcher_{next(_numbers)}.{name}", path)
        if spec is None or spec.loader is None:
            raise RuntimeError(f"cannot load the launcher at {path}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def separate_launchers() -> bool:
    """Make Triton load launchers with `load_apart`; False if this Triton has no such place, and threads are not safe."""
    from triton.runtime import build

    if not hasattr(build, "_load_module_from_path"):
        return False
    build._load_module_from_path = load_apart
    return True


def spare_checks(package: str = "headrace.engine.kernels") -> int:
    """Let the kernels of `package` that were launched before go without that check: their constants never change. How many."""
    from triton.runtime.jit import JITFunction

    found = {
        id(value): value
        for name, module in list(sys.modules.items())
        if name.startswith(package + ".")
        for value in vars(module).values()
        if isinstance(value, JITFunction) and value.device_caches and getattr(value, "used_global_vals", None)
    }
    for kernel in found.values():
        kernel.used_global_vals.clear()
    return len(found)


def power_of_2(n: int) -> int:
    """The least power of two that is not less than n >= 1."""
    return 1 << (n - 1).bit_length()
