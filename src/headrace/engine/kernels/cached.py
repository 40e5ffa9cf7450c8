"""Kernels in Triton's cache of files: what they are called there, and whether they are there."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import os
import sys
from typing import Any

LATE = ("prefill_hopper", "decode_hopper", "gemm_hopper")
LATE_QUANTIZED = ("single", "streamed", "quantized_hopper")
"""Modules beside this one that are imported when they are first needed; an older Triton has no language for them."""
_USED = ("compile", "get_cache_key", "get_cache_manager", "get_cache_invalidating_env_vars", "make_backend")
_PARAMETERS = ["self", "key", "signature", "device", "constexprs", "options", "attrs", "warmup"]


def settle_keys(*, quantized: bool = False) -> int:
    """Have Triton compute what names this package's kernels in its cache, always in one order. How many.

    A kernel's name tells the constants that functions called by it use only if those were named before (seen in 3.6.0). So it would
    depend on which kernel is launched first: a start would not find what another left, and no process what another compiled.
    """
    from triton.runtime.jit import JITFunction

    for name in LATE + (LATE_QUANTIZED if quantized else ()):
        with contextlib.suppress(ImportError, AttributeError):
            importlib.import_module(f"{__package__}.{name}")
    found = [
        value
        for name, module in sorted(sys.modules.items())
        if name.startswith(f"{__package__}.")
        for value in vars(module).values()
        if isinstance(value, JITFunction) and value.fn.__module__ == name
    ]
    for kernel in found:
        kernel.cache_key  # noqa: B018
    return len(found)


def hash_triton() -> None:
    """Have Triton hash its own files, which all names in its cache hold: 400 MB, and whoever asks before that is done hashes, too."""
    from triton.compiler import compiler
    from triton.runtime import cache

    (getattr(cache, "triton_key", None) or getattr(compiler, "triton_key", lambda: ""))()


def why_not_shared() -> str | None:
    """Why one process does not find there what another compiles, or None."""
    try:
        from triton.compiler import compiler
        from triton.runtime.jit import JITFunction

        for name in _USED:
            getattr(compiler, name)
        if list(inspect.signature(JITFunction._do_compile).parameters) != _PARAMETERS:
            return "this Triton compiles in another way"
    except (ImportError, AttributeError) as error:
        return f"this Triton compiles in another way ({error})"
    for name, why in (("TRITON_ALWAYS_COMPILE", "forbids its cache"), ("TRITON_INTERPRET", "lets nothing be compiled")):
        if os.environ.get(name, "0").lower() in ("1", "true", "yes", "on"):
            return f"{name} {why}"
    return None


def place_of(source: Any, target: Any, options: Any) -> tuple[str, str]:
    """What Triton's files call a compiled kernel: its folder and its name there."""
    from triton.compiler import compiler

    made = compiler.get_cache_key(
        source, compiler.make_backend(target), options, env_vars=compiler.get_cache_invalidating_env_vars()
    )
    return hashlib.sha256(made.encode()).hexdigest(), f"{source.name[:150]}.json"


def is_there(folder: str, name: str) -> bool:
    """Whether Triton will find the kernel in its files."""
    from triton.compiler import compiler

    return name in (compiler.get_cache_manager(folder).get_group(name) or {})
