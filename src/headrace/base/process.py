"""Facts about this operating-system process."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

_IMPORTED_S = time.monotonic()


def process_start_s() -> float:
    """When this process was started, on the CLOCK_MONOTONIC scale, so that interpreter start-up counts.

    Read from /proc (10 ms resolution); where there is no /proc, the time this module was imported.
    """
    try:
        with open("/proc/self/stat", encoding="ascii") as stat:
            # The second field may hold spaces and parentheses, so count from its end; starttime is field 22.
            ticks = int(stat.read().rpartition(")")[2].split()[19])
        booted_to_now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.monotonic() - (booted_to_now_s - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED_S


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside: a start makes things that stay, and the collector would walk them again and again.

    Nor does it walk them later: what exists at the end is left out of all collections to come.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def import_numpy() -> None:
    """Import numpy, its library for matrix products without threads: starting them takes 40 ms of CPU time, and nothing here
    multiplies matrices with it. A number of threads that the user has set stands; other processes are not told."""
    own = "OPENBLAS_NUM_THREADS" not in os.environ
    if own:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        if own:
            del os.environ["OPENBLAS_NUM_THREADS"]
