"""What happens to kernels compiled by other processes, told as JSON: `compiled_apart.py FOLDER`. Needs no GPU: nothing is launched.

Run by `test_kernel_compilers`, in a process of its own since the interpreter of other tests cannot be left again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

FOLDER = Path(sys.argv[1])
KERNELS = """
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def doubled(x, n, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.math.exp(tl.load(x + at, mask=at < n)) * scale, mask=at < n)


@triton.jit
def refused(x, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 1000, "too small")
    tl.store(x, BLOCK)


@gluon.jit
def counted(out, BLOCK: gl.constexpr, layout: gl.constexpr):
    at = gl.arange(0, BLOCK, layout=layout)
    gl.store(out + at, at)


LAYOUT = gl.BlockedLayout([1], [32], [4], [0])
"""


class Driver:
    """A card of which nothing is there but its name."""

    class utils:
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 232448})
        load_binary = staticmethod(lambda name, kernel, shared, device: (0, 0, 32, 0, 1024))

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    launcher_cls = staticmethod(lambda source, metadata: lambda *arguments: launched.append(source.name))


launched: list[str] = []
compiled_here: list[str] = []
warnings: list[str] = []


def heard(*, src, cache_hit, **_) -> None:
    if not cache_hit:
        compiled_here.append(src.name)


def children(of: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == of:
            found.append(int(path.parent.name))
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def launches():
    x, out = torch.zeros(64), torch.zeros(256, dtype=torch.int32)
    made = [lambda n=n: tiny.doubled[(1,)](x, 50, 0.5, BLOCK=n) for n in (64, 128, 256)]
    return [*made, lambda: tiny.counted[(1,)](out, 128, tiny.LAYOUT)]


def from_here_on(name: str) -> None:
    """An empty cache, and nothing remembered."""
    knobs.cache.dir = str(FOLDER / name)
    for kernel in (tiny.doubled, tiny.refused, tiny.counted):
        kernel.device_caches.clear()
    for seen in (launched, compiled_here, warnings):
        seen.clear()


def run(jobs, threads: int = 4) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda job: job(), jobs))


def facts(made: Compilers | None = None) -> dict:
    files = sorted((FOLDER / Path(knobs.cache.dir).name).glob("*/*.cubin"))
    found = {
        "launched": len(launched), "here": len(compiled_here), "warnings": list(warnings),
        "cubins": {f"{f.parent.name}/{f.name}": hashlib.sha256(f.read_bytes()).hexdigest() for f in files},
    }  # fmt: skip
    if made is None:
        return found
    copies = [] if made.pid is None else [made.pid, *children(made.pid)]
    begin = time.monotonic()
    made.close()
    left = [pid for pid in copies if Path(f"/proc/{pid}").exists()]
    return found | {
        "compiled": made.compiled, "lost": made.lost, "note": made.note(), "left": left, "copies": max(0, len(copies) - 1),
        "close_s": time.monotonic() - begin,
    }  # fmt: skip


def threads() -> dict:
    run(launches())
    return facts()


def processes() -> dict:
    made = Compilers(2)
    with made.serving():
        run(launches())
    return facts(made)


def cached() -> dict:
    run(launches())
    for kernel in (tiny.doubled, tiny.counted):
        kernel.device_caches.clear()
    compiled_here.clear()
    made = Compilers(2)
    with made.serving():
        run(launches())
    return facts(made)


def struck(made: Compilers, number: signal.Signals) -> dict:
    """One kernel, then a signal to every process that compiles, then the other kernels."""
    with made.serving():
        run(launches()[:1])
        for pid in children(made.pid):
            os.kill(pid, number)
        run(launches()[1:])
    return facts(made)


def killed() -> dict:
    return struck(Compilers(2), signal.SIGKILL)


def stopped() -> dict:
    return struck(Compilers(1, job_s=0.5), signal.SIGSTOP)


def too_long() -> dict:
    made = Compilers(1, job_s=0.001)
    with made.serving():
        run(launches())
    return facts(made)


def first_copy_gone() -> dict:
    made = Compilers(2)
    os.kill(made.pid, signal.SIGKILL)
    with made.serving():
        run(launches())
    return facts(made)


def first_copy_stopped() -> dict:
    made = Compilers(2, job_s=0.3)
    os.kill(made.pid, signal.SIGSTOP)
    with made.serving():
        run(launches())
    return facts(made)


def no_fork() -> dict:
    def refuse():
        raise OSError("out of processes")

    fork, os.fork = os.fork, refuse
    try:
        made = Compilers(2)
    finally:
        os.fork = fork
    with made.serving():
        run(launches())
    return facts(made)


def few_cores() -> dict:
    cores, compilers.usable_cores = compilers.usable_cores, lambda: 2
    try:
        return facts(Compilers())
    finally:
        compilers.usable_cores = cores


def interpreted() -> dict:
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        return facts(Compilers())
    finally:
        del os.environ["TRITON_INTERPRET"]


def refused() -> dict:
    """A kernel that does not compile says so where it is launched, and the processes go on."""
    made = Compilers(1)
    said = ""
    with made.serving():
        try:
            tiny.refused[(1,)](torch.zeros(4), BLOCK=16)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        run(launches())
    return facts(made) | {"said": said}


def not_found() -> dict:
    """Of a kernel that was made inside a function the copies have none."""

    @triton.jit
    def inner(x, BLOCK: triton.language.constexpr):
        triton.language.store(x, BLOCK)

    made = Compilers(1)
    with made.serving():
        inner[(1,)](torch.zeros(4, dtype=torch.int32), BLOCK=16)
    return facts(made)


def orphaned() -> dict:
    """Copies end with the process that they were made from, whatever ended it."""
    far, near = os.pipe()
    if (pid := os.fork()) == 0:
        made = Compilers(2)
        with made.serving():
            run(launches()[:1])
        os.write(near, json.dumps([made.pid, *children(made.pid)]).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    copies = json.loads(os.read(far, 1 << 16))
    os.close(near)
    os.close(far)
    deadline = time.monotonic() + 10.0
    while (left := [c for c in copies if running(c)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return {"copies": len(copies) - 1, "left": left}


def sockets() -> dict:
    """Whoever waits for this process's end of a socket to close waits for no copy."""
    near, far = socket.socketpair()
    made = Compilers(1)
    with made.serving():
        run(launches()[:1])
        near.close()
        far.settimeout(5.0)
        closed = far.recv(1) == b""
    return facts(made) | {"closed": closed}


def keys() -> dict:
    """What kernels are called in the cache does not depend on the order in which their modules are imported or asked."""
    told = []
    for order in (1, -1):
        far, near = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(far)
            try:
                for name in ("codes", "decode", "norm", "prefill", "rope")[::order]:
                    importlib.import_module(f"headrace.engine.kernels.{name}")
                from headrace.engine.kernels import decode

                count = names.settle_keys(quantized=True)
                asked = (decode._decode, decode._prefix, decode.over_pages)[::order]
                found = {k.__name__: k.cache_key for k in asked}
                os.write(near, json.dumps([count, found]).encode())
            finally:
                os._exit(0)
        os.close(near)
        os.waitpid(pid, 0)
        told.append(json.loads(os.read(far, 1 << 16)))
        os.close(far)
    return {"told": told}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "tiny.py").write_text(KERNELS)
    sys.path.insert(0, str(FOLDER))
    driver.set_active(Driver())
    knobs.compilation.listener = heard
    import tiny

    from headrace.engine.kernels import cached as names
    from headrace.engine.kernels import compilers
    from headrace.engine.kernels.compilers import Compilers

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logging.getLogger("headrace.engine").addHandler(Heard(logging.WARNING))
    told = {}
    for scenario in (
        threads, processes, cached, killed, stopped, too_long, first_copy_gone, first_copy_stopped, no_fork, few_cores,
        interpreted, refused, not_found, orphaned, sockets, keys,
    ):  # fmt: skip
        from_here_on(scenario.__name__)
        begin = time.monotonic()
        try:
            told[scenario.__name__] = scenario()
        except Exception:
            told[scenario.__name__] = {"failed": traceback.format_exc()}
        told[scenario.__name__]["took_s"] = time.monotonic() - begin
    print(json.dumps(told))
