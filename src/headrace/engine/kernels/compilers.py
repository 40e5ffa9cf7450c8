"""Processes that compile kernels side by side.

Translating a kernel to the compiler's own form is Python's work, so threads of one process do it one after the other, and each that
comes back from the compiler's passes waits for the interpreter behind the others. Processes do not. They compile into Triton's cache of
files, where this process then finds the kernel as if an earlier start had compiled it; whatever they do not do is compiled here.

All are forked from one copy of this process, made before weights are loaded, while it has few threads and no memory that the device
reads; torch has asked for the device by then, which no copy may do. The copy waits in memory that it shares with this process, and
multiplies when the first kernel is missing; where none is, it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from headrace.engine.kernels.cached import hash_triton, is_there, place_of, why_not_shared
from headrace.engine.kernels.copies import multiply

log = logging.getLogger("headrace.engine")

LEAST_CORES, MOST_PROCESSES = 4, 16
"""With fewer cores the interpreter is not what kernels wait for; with more, the longest kernel is."""
JOB_S = 30.0
"""How long a process may take for one kernel, the longest of which takes 5 s; who needs longer counts as hung."""
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores that this process can keep busy: those it may run on, and no more than its control group has time for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max", which is no number
        quota, period = map(int, CPU_MAX.read_text().split())
        cores = max(1, min(cores, quota // period))
    return cores


class Compilers:
    """Up to `count` processes that compile while `serving`. `why_not` says why there are none; `close` ends them.

    Make it before the process computes anything: the copy takes as long as its memory is large (10 ms for 500 MB).
    """

    def __init__(self, count: int | None = None, *, job_s: float = JOB_S) -> None:
        cores = usable_cores()
        self.count = min(MOST_PROCESSES, cores) if count is None else count
        self.compiled = 0
        self.lost = 0
        self.pid: int | None = None
        """Of the copy that becomes the others."""
        self._job_s = job_s
        self._lock = threading.Lock()
        self._started = False
        self._asked: dict[tuple[str, str], threading.Event] = {}
        self._idle: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self.why_not = why_not_shared() if hasattr(os, "fork") else "this system cannot copy a process"
        if self.why_not is None and count is None and cores < LEAST_CORES:
            self.why_not = f"of {cores} cores there are too few"
        if self.why_not is None:
            try:
                self._fork()
            except OSError as error:
                self.why_not = f"this process cannot be copied ({error})"
        if self.why_not is not None:
            self.count = 0
        # While weights load; the copy does the same for itself.
        self._hashing = threading.Thread(target=hash_triton, name="hash-triton", daemon=True)
        self._hashing.start()

    def _fork(self) -> None:
        pairs = [Pipe() for _ in range(self.count)]
        self._control, order = Pipe()
        lines, others = [near for near, _ in pairs], [far for _, far in pairs]
        with warnings.catch_warnings():
            # A copy has none of the other threads, whose locks it does not need; if it hangs after all it is left alone.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                multiply(order, others, self._job_s)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        self.pid = pid
        for far in (order, *others):
            far.close()
        for line in lines:
            self._idle.put(line)
        self._end = weakref.finalize(self, _end, pid, [self._control, *lines])

    def close(self) -> None:
        """End all; what is being compiled is lost."""
        if self.why_not is None:
            self._end()

    def note(self) -> str:
        """For the notes of the start."""
        if self.why_not is not None:
            return f"kernels are compiled by threads of one process, since {self.why_not}"
        if not self._started:
            return "kernels came from the cache"
        lost = f" ({self.lost} were lost on the way)" if self.lost else ""
        return f"{self.compiled} kernels were compiled by {self.count} processes{lost}"

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Inside, a thread that launches a kernel which is not in the cache waits until one of the processes has compiled it."""
        self._hashing.join()
        if self.why_not is not None:
            yield
            return
        from triton.runtime.jit import JITFunction

        load = JITFunction._do_compile

        def compile_elsewhere(fn, key, signature, device, constexprs, options, attrs, warmup):
            try:
                self._compile(fn, (signature, constexprs, attrs), options)
            except Exception as error:  # a kernel that cannot be sent, say
                log.warning("kernel %s is compiled by a thread: %s: %s", fn.__name__, type(error).__name__, error)
            return load(fn, key, signature, device, constexprs, options, attrs, warmup)

        JITFunction._do_compile = compile_elsewhere
        try:
            yield
        finally:
            JITFunction._do_compile = load

    def _compile(self, fn: Any, version: tuple[Any, Any, Any], options: Any) -> None:
        from triton.runtime import driver

        module, name = fn.fn.__module__, fn.fn.__qualname__
        target = driver.active.get_current_target()
        if getattr(sys.modules.get(module), name, None) is not fn:
            return  # a copy cannot find it
        kernel = place_of(fn.ASTSource(fn, *version), target, options)
        if is_there(*kernel):
            return
        with self._lock:
            first = kernel not in self._asked
            done = self._asked.setdefault(kernel, threading.Event())
        if not first:
            done.wait()  # no longer than one process may take
            return
        try:
            done_elsewhere = self._ask(pickle.dumps((module, name, fn.ASTSource, version, target, options.__dict__)))
            with self._lock:
                self.compiled += done_elsewhere
        finally:
            done.set()

    def _ask(self, job: bytes) -> bool:
        """Whether one of the processes has done it."""
        with self._lock:
            if not self._started:
                self._started = True
                with contextlib.suppress(OSError):  # then their lines are closed, too
                    self._control.send_bytes(b"begin")
        line = self._idle.get()
        if line is None:
            self._idle.put(None)  # for whoever else waits
            return False
        try:
            line.send_bytes(job)
            if not line.poll(self._job_s + 1.0):
                raise TimeoutError
            error = line.recv()
        except (OSError, EOFError) as lost:
            why = "did not answer" if isinstance(lost, TimeoutError) else "has died or took too long"
            log.warning("a process that compiles kernels %s; a thread compiles in its stead", why)
            line.close()
            with self._lock:
                self.lost += 1
                if self.lost == self.count:
                    self._idle.put(None)
            return False
        self._idle.put(line)
        if error is not None:
            log.warning("a process could not compile a kernel, a thread tries: %s", error)
        return error is None


def _end(pid: int, lines: list[Connection]) -> None:
    """Close the lines, whose other ends go by that, and wait a moment for the copy."""
    for line in lines:
        line.close()
    deadline = time.monotonic() + 2.0
    with contextlib.suppress(ChildProcessError):  # somebody else waits for every child
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return
            time.sleep(0.002)
