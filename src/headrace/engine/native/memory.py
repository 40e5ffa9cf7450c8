"""Large buffers: page-aligned, in huge pages where the system gives them; zeroed, or a file's bytes."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt


def buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    """`nbytes` zero bytes; pages are allocated when they are first touched. The memory lives as long as the array.

    Weights and KV are read in long runs all over: with pages of 4 KiB the table of addresses would not fit its cache.
    """
    return _huge(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), nbytes)


def mapped(file: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """`nbytes` bytes of an open file, read-only, where the system keeps them; closing or replacing the file changes nothing."""
    return _huge(mmap.mmap(file, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ, offset=offset), nbytes)


def huge_file_bytes() -> int:
    """How much of the files that this process has mapped and touched lies in huge pages; 0 where the system does not say (Linux does)."""
    with suppress(OSError), open("/proc/self/smaps_rollup", "rb") as rollup:
        for line in rollup:
            if line.startswith(b"FilePmdMapped:"):
                return int(line.split()[1]) << 10
    return 0


def _huge(memory: mmap.mmap, nbytes: int) -> npt.NDArray[np.uint8]:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages serves small ones
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, nbytes)
