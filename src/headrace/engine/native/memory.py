"""Large buffers: zeroed, page-aligned, in huge pages where the system gives them."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt


def buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    """`nbytes` zero bytes; pages are allocated when they are first touched. The memory lives as long as the array.

    Weights and KV are read in long runs all over: with pages of 4 KiB the table of addresses would not fit its cache.
    """
    mapped = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages serves small ones
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8, nbytes)
