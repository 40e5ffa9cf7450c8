"""Launchers of one name, loaded again and from threads, keep their own functions."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="needs a C compiler")

SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""


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
