"""What copies of the engine's process do that compile kernels for it (`headrace.engine.kernels.compilers`)."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
from multiprocessing.connection import Connection
from types import SimpleNamespace

from headrace.engine.kernels.cached import hash_triton


def multiply(order: Connection, lines: list[Connection], job_s: float) -> None:
    """What the first copy does: wait for the order, become as many as there are lines, and end them when the order's line closes."""
    # Nothing that was garbage in the process may close a file here, and a collection would write to memory that is shared.
    gc.disable()
    gc.freeze()
    _let_go({c.fileno() for c in (order, *lines)})
    hash_triton()
    children = []
    with contextlib.suppress(EOFError, OSError):
        order.recv_bytes()
        for at, line in enumerate(lines):
            try:
                pid = os.fork()
            except OSError:
                pid = -1  # its line closes, and the others do its work
            if pid == 0:
                for other in (order, *lines[at + 1 :]):
                    other.close()
                _serve(line, job_s)
                return
            if pid > 0:
                children.append(pid)
            line.close()
        order.recv_bytes()
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)


def _let_go(kept: set[int]) -> None:
    """Hold nothing of the process that this is a copy of: files and sockets, what it does on signals, its standard input and output."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # reaches the whole group; that process decides
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write("1000")  # where memory runs out, the copies go first
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nothing, standard)
    with contextlib.suppress(OSError):
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in kept:
                with contextlib.suppress(OSError):
                    os.close(fd)


def _serve(line: Connection, job_s: float) -> None:
    """Compile what comes in until the line closes; one answer each, None or what went wrong."""
    from triton.compiler import compiler
    from triton.runtime import driver

    with contextlib.suppress(EOFError, OSError):
        while True:
            job = line.recv_bytes()
            signal.setitimer(signal.ITIMER_REAL, job_s)  # ends this process
            error = None
            try:
                module, name, source, (signature, constexprs, attrs), target, options = pickle.loads(job)
                # A copy may know the device's kind and must not touch it.
                driver.set_active(SimpleNamespace(get_current_target=lambda target=target: target))
                kernel = getattr(importlib.import_module(module), name)
                compiler.compile(source(kernel, signature, constexprs, attrs), target=target, options=options)
            except Exception as found:
                error = f"{type(found).__name__}: {found}"
            signal.setitimer(signal.ITIMER_REAL, 0)
            line.send(error)
