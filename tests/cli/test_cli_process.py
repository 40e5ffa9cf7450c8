"""What a start does to its process: nothing that outlives it but what was asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_NUMPY = """
import os, sys
from headrace.base.process import import_numpy
before = dict(os.environ)
import_numpy()
import_numpy()
assert "numpy" in sys.modules and dict(os.environ) == before
print(len(os.listdir("/proc/self/task")))
"""

_COLLECTOR = """
import gc
from headrace.base.process import collector_paused
class Loop:
    def __init__(self): self.me = self
stays = Loop()
with collector_paused():
    assert not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count() > 0
before = len(gc.get_objects())
later = [Loop() for _ in range(100)]
del later
assert gc.collect() >= 100
assert len(gc.get_objects()) < before + 100
gc.disable()
with collector_paused():
    pass
assert not gc.isenabled()
"""


def python(code: str, **env: str) -> str:
    base = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=base | env
    ).stdout


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted by /proc")
def test_numpy_starts_no_threads_unless_the_user_says_so():
    assert int(python(_NUMPY)) == 1
    if (os.cpu_count() or 1) > 1:  # the library caps the number at that of cores
        told = int(python(_NUMPY, OPENBLAS_NUM_THREADS="2"))
        assert told == int(
            python("import numpy, os; print(len(os.listdir('/proc/self/task')))", OPENBLAS_NUM_THREADS="2")
        )


def test_what_a_start_makes_is_not_collected_again_and_what_comes_later_is():
    python(_COLLECTOR)
