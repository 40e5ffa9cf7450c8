"""Launchers of one name, loaded again and from threads, keep their own functions; and what is spared when kernels are launched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("triton")

SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""


@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="needs a C compiler")
def test_each_launcher_is_a_module_of_its_own(tmp_path, monkeypatch):
    from triton.runtime import build

    from headrace.engine.kernels.launchers import load_apart, separate_launchers

    paths = []
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = folder / "launcher.c"
        source.write_text(SOURCE % number)
        try:
            paths.append(build._build("__triton_launcher", str(source), str(folder), [], [], [], []))
        except Exception as error:
            pytest.skip(f"no C extension can be built here: {error}")
    monkeypatch.setattr(build, "_load_module_from_path", build._load_module_from_path)
    assert separate_launchers()
    assert build._load_module_from_path is load_apart
    first = [load_apart("__triton_launcher", p) for p in paths]
    with ThreadPoolExecutor(8) as threads:
        again = list(threads.map(lambda i: (i % 4, load_apart("__triton_launcher", paths[i % 4])), range(200)))
    assert [m.launch() for m in first] == [0, 1, 2, 3]
    assert all(module.launch() == number for number, module in again)


PROGRAM = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Driver:
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

class Compiled:
    function, packed_metadata = 0, ()
    launch_metadata = lambda self, *_: None
    run = lambda self, *_: launched.append(1)

def compiled(self, key, *_):
    self.cache_key  # lists the constants, as compiling does
    self.device_caches[0][0][key] = Compiled()
    return Compiled()

launched = []
driver.set_active(Driver())
JITFunction._do_compile = compiled
from headrace.engine.cuda.repack import repacked
from headrace.engine.kernels import launchers, quantized
from headrace.engine.quant.formats import form

matrix = repacked([form("nf4").quantize(torch.randn(64, 256))])
out = torch.empty(64 * 256, dtype=torch.bfloat16)
assert launchers.spare_checks() == 0
quantized.dequantize(matrix, out)
key = quantized._dequantize.cache_key
assert len(quantized._dequantize.used_global_vals) > 5
assert launchers.spare_checks() == 1
quantized.dequantize(matrix, out)
assert launched == [1, 1]
assert quantized._dequantize.cache_key == key
assert not quantized._dequantize.used_global_vals
assert launchers.spare_checks() == 0
"""


def test_launched_kernels_go_without_the_comparison_of_constants():
    """With a driver that launches nothing."""
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120, env=compiled
    )
    assert done.returncode == 0, done.stderr
