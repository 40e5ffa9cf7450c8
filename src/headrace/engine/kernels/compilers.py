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
import gc
import hashlib
import importlib
import inspect
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
from typing import Any

log = logging.getLogger("headrace.engine")

LEAST_CORES, MOST_PROCESSES = 4, 16
"""With fewer cores the interpreter is not what kernels wait for; with more, the longest kernel is."""
START_S, JOB_S = 5.0, 15.0
"""How long a process may take to begin and to compile one kernel, the longest of which takes 5 s; who needs longer counts as hung."""
KERNELS = ("prefill_hopper", "decode_hopper", "gemm_hopper")
"""Modules beside this one that are imported late, which each process would do anew; an older Triton has no language for them."""
_OF_COMPILER = ("compile", "get_cache_key", "get_cache_manager", "get_cache_invalidating_env_vars", "make_backend")
_PARAMETERS = ["self", "key", "signature", "device", "constexprs", "options", "attrs", "warmup"]


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def settle_keys() -> int:
    """Have Triton compute what names this package's kernels in its cache, always in one order. How many.

    A kernel's name tells the constants that functions called by it use only if those were named before (seen in 3.6.0). So it would
    depend on which kernel is launched first: a start would not find what another left, and no process what another compiled.
    """
    from triton.runtime.jit import JITFunction

    for name in KERNELS:
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


class Compilers:
    """Up to `count` processes that compile while `serving`. `why_not` says why there are none; `close` ends them.

    Make it before the process computes anything: the copy takes as long as its memory is large (10 ms for 500 MB).
    """

    def __init__(self, count: int | None = None, *, start_s: float = START_S, job_s: float = JOB_S) -> None:
        cores = usable_cores()
        self.count = min(MOST_PROCESSES, cores) if count is None else count
        self.compiled = 0
        self.lost = 0
        self.pid: int | None = None
        """Of the copy that becomes the others."""
        self._start_s, self._job_s = start_s, job_s
        self._lock = threading.Lock()
        self._started = False
        self._asked: dict[tuple[str, str], threading.Event] = {}
        self._fresh: set[Connection] = set()
        self._idle: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self.why_not = _unfit()
        if self.why_not is None and count is None and cores < LEAST_CORES:
            self.why_not = f"of {cores} cores there are too few"
        if self.why_not is None:
            try:
                self._fork()
            except OSError as error:
                self.why_not = f"this process cannot be copied ({error})"
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
                _multiply(order, others, self._job_s)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        self.pid = pid
        for far in (order, *others):
            far.close()
        self._fresh.update(lines)
        for line in lines:
            self._idle.put(line)
        self._end = weakref.finalize(self, _end, pid, [self._control, *lines])

    @property
    def ready(self) -> int:
        """How many can compile at a time."""
        return 0 if self.why_not is not None else self.count - self.lost

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
                self._compile(fn, signature, constexprs, options, attrs)
            except Exception as error:  # a kernel that cannot be sent, say
                log.warning("kernel %s is compiled by a thread: %s: %s", fn.__name__, type(error).__name__, error)
            return load(fn, key, signature, device, constexprs, options, attrs, warmup)

        JITFunction._do_compile = compile_elsewhere
        try:
            yield
        finally:
            JITFunction._do_compile = load

    def _compile(self, fn: Any, signature: Any, constexprs: Any, options: Any, attrs: Any) -> None:
        from triton.runtime import driver

        module, name = fn.fn.__module__, fn.fn.__qualname__
        target = driver.active.get_current_target()
        if getattr(sys.modules.get(module), name, None) is not fn:
            return  # a copy cannot find it
        kernel = _kernel(fn.ASTSource(fn, signature, constexprs, attrs), target, options)
        if _cached(*kernel):
            return
        with self._lock:
            done = self._asked.get(kernel)
            first = done is None
            if done is None:
                done = self._asked[kernel] = threading.Event()
        if not first:
            done.wait()  # no longer than one process may take
            return
        try:
            job = (module, name, signature, constexprs, attrs, target, options.__dict__)
            if self._ask(pickle.dumps(job)):
                with self._lock:
                    self.compiled += 1
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
            if line in self._fresh:
                _answer(line, self._start_s)
                self._fresh.discard(line)
            error = _answer(line, self._job_s + 1.0)
        except (OSError, EOFError) as lost:
            self._lose(line, lost)
            return False
        self._idle.put(line)
        if error is not None:
            log.warning("a process could not compile a kernel, a thread tries: %s", error)
        return error is None

    def _lose(self, line: Connection, error: Exception) -> None:
        log.warning(
            "a process that compiles kernels %s; a thread compiles in its stead",
            "did not answer" if isinstance(error, TimeoutError) else "has died or took too long",
        )
        with self._lock:
            line.close()
            self.lost += 1
            if self.lost == self.count:
                self._idle.put(None)


def _unfit() -> str | None:
    """Why kernels of this Triton cannot be compiled so; None if they can."""
    if not hasattr(os, "fork"):
        return "this system cannot copy a process"
    try:
        from triton.compiler import compiler
        from triton.runtime.jit import JITFunction

        for name in _OF_COMPILER:
            getattr(compiler, name)
        if list(inspect.signature(JITFunction._do_compile).parameters) != _PARAMETERS:
            return "this Triton compiles in another way"
    except (ImportError, AttributeError) as error:
        return f"this Triton compiles in another way ({error})"
    for name, why in (("TRITON_ALWAYS_COMPILE", "forbids its cache"), ("TRITON_INTERPRET", "lets nothing be compiled")):
        if os.environ.get(name, "0").lower() in ("1", "true", "yes", "on"):
            return f"{name} {why}"
    return None


def _kernel(source: Any, target: Any, options: Any) -> tuple[str, str]:
    """What Triton's files call a compiled kernel: its place and its name there."""
    from triton.compiler import compiler

    made = compiler.get_cache_key(
        source, compiler.make_backend(target), options, env_vars=compiler.get_cache_invalidating_env_vars()
    )
    return hashlib.sha256(made.encode()).hexdigest(), f"{source.name[:150]}.json"


def _cached(place: str, name: str) -> bool:
    """Whether Triton will find the kernel in its files."""
    from triton.compiler import compiler

    return name in (compiler.get_cache_manager(place).get_group(name) or {})


def _answer(line: Connection, limit_s: float) -> Any:
    if not line.poll(limit_s):
        raise TimeoutError
    return line.recv()


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


# From here on in the copies


def _multiply(order: Connection, lines: list[Connection], job_s: float) -> None:
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


class _NoDevice:
    """Triton's driver in a copy, which may know the device's kind and must not touch it."""

    target: Any = None

    def get_current_target(self) -> Any:
        return self.target


def _serve(line: Connection, job_s: float) -> None:
    """Compile what comes in until the line closes; one answer each, None or what went wrong."""
    from triton.compiler import compiler
    from triton.runtime import driver

    device = _NoDevice()
    driver.set_active(device)
    line.send("ready")
    while True:
        try:
            job = line.recv_bytes()
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_REAL, job_s)  # ends this process
        error = None
        try:
            module, name, signature, constexprs, attrs, target, options = pickle.loads(job)
            device.target = target
            fn = getattr(importlib.import_module(module), name)
            compiler.compile(_source(fn)(fn, signature, constexprs, attrs), target=target, options=options)
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
        signal.setitimer(signal.ITIMER_REAL, 0)
        line.send(error)


def _source(fn: Any) -> Any:
    if getattr(fn, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler.compiler import ASTSource

    return ASTSource
