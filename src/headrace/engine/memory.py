"""Host memory: what is available to this process, and the allocator settings that a step's large buffers need."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes this process could still allocate: the kernel's estimate, or less where a control group allows less."""
    found = _meminfo_available(root / "proc/meminfo")
    for limit, usage, reclaimable in _cgroup_memory(root):
        found = min(found, max(0, limit - usage + reclaimable))
    return found


def _meminfo_available(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _cgroup_memory(root: Path) -> list[tuple[int, int, int]]:
    """(limit, usage, reclaimable file cache) of each control group with a limit, version 2 or 1, from ours upwards."""
    found = []
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            if (one := _limits(folder, *names)) is not None:
                found.append(one)
            if folder == base:
                break
    return found


def _limits(folder: Path, limit: str, usage: str, cache: str) -> tuple[int, int, int] | None:
    try:
        most = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if most == "max" or int(most) >= 1 << 60:
        return None
    return int(most), used, int(stat.get(cache, 0))


def physical_cores() -> int:
    """Cores this process may run on, hyper-threads counted once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def keep_large_buffers() -> bool:
    """Let glibc's malloc reuse freed buffers of up to 32 MiB instead of returning their pages to the kernel.

    A step allocates and frees the same activations in every layer; by default each would be mapped and its pages faulted in
    again. Returns whether the allocator took the settings (it is not glibc's otherwise).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), (_M_TRIM_THRESHOLD, 1 << 30), (_M_ARENA_MAX, 1))
    results = [bool(mallopt(parameter, value)) for parameter, value in settings]
    return all(results)


def huge_pages(nbytes: int) -> mmap.mmap:
    """Private memory of at least `nbytes`, in huge pages where the kernel gives them on request.

    Scattered reads of blocks touch a page each; with small pages a step spends a tenth of its attention on address
    translation.
    """
    pages = mmap.mmap(-1, max(nbytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
