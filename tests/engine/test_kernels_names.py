"""What kernels take from their modules must be something that a compiler may read; the interpreter reads anything."""

import importlib
import inspect
import pkgutil
import types

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import triton.language as tl
from kernel_device import ON_GPU  # noqa: F401 - chooses the interpreter before kernels are imported

from headrace.engine import kernels
from headrace.engine.kernels import quantized


def _code(function):
    """The Python function behind a kernel, compiled or interpreted; None if it is no kernel."""
    inner = getattr(function, "fn", None)
    return inner if isinstance(inner, types.FunctionType) and type(function).__module__.startswith("triton") else None


def _foreign(function: types.FunctionType) -> list[str]:
    """Names of the module that the kernel reads and that are neither constants of the compiler, kernels, modules nor builtins
    of the language."""
    allowed = (tl.constexpr, types.ModuleType, tl.dtype)
    names = inspect.getclosurevars(function).globals
    return sorted(
        name
        for name, value in names.items()
        if not isinstance(value, allowed)
        and _code(value) is None
        and not getattr(value, "__module__", "").startswith("triton")
        and not hasattr(value, "__triton_builtin__")
        and not hasattr(value, "__triton_aggregate__")
    )


MODULES = [m.name for m in pkgutil.iter_modules(kernels.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_kernels_read_constants_only(name):
    try:
        module = importlib.import_module(f"{kernels.__name__}.{name}")
    except ImportError as missing:
        pytest.skip(str(missing))
    found = {n: _foreign(code) for n, f in vars(module).items() if (code := _code(f)) is not None}
    assert not {n: names for n, names in found.items() if names}


def test_a_plain_value_would_be_noticed():
    def kernel():
        return MODULES

    assert _foreign(kernel) == ["MODULES"]
    assert _code(quantized._quantized) is not None
