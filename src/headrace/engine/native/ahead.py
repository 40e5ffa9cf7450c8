"""Memory for the KV pool a little ahead of its use, while the engine has nothing to do.

A page of the pool gets its memory when it is first written. In a virtual machine that may take milliseconds for 2 MiB, and a
step that begins new blocks waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import headrace_native
import numpy as np
import numpy.typing as npt

from headrace.base.units import MIB, format_bytes
from headrace.control.step import BlockAppend

log = logging.getLogger("headrace.engine")

PIECE_BYTES = 2 * MIB
"""Given at once, while a message may wait: one huge page, which the system gives whole or not at all."""
HEADROOM_BYTES = 96 * MIB
_LOOKS_BYTES = 32 * MIB
"""Given between two looks at how much memory is left."""


def possible() -> bool:
    return headrace_native.populate(np.empty(0, np.uint8), 0, 0) == 0


def pool_note() -> str:
    if not possible():
        return "memory of the KV pool is allocated as it is used and not ahead of use: that takes Linux 5.14 or later"
    ahead = f"up to twice what was used plus {HEADROOM_BYTES >> 20} MiB"
    return f"memory of the KV pool is allocated as it is used and, while idle, ahead of use: {ahead}"


class Ahead:
    """Readies `pool`, whose blocks are handed out from the lowest, up to twice what has been used and `HEADROOM_BYTES`.

    Nothing is readied before the first block is used, nor while less than `reserve_bytes` are `available`: what the pool may
    still take must not be the memory that others of the machine wait for. Belongs to one thread; steps may run meanwhile.
    """

    def __init__(
        self, pool: npt.NDArray[np.uint8], block_bytes: int, available: Callable[[], int], reserve_bytes: int
    ) -> None:
        self._pool = pool
        self._block_bytes = block_bytes
        self._available = available
        self._reserve_bytes = reserve_bytes
        self._address = pool.__array_interface__["data"][0]
        self._blocks = 0
        """One more than the highest block in use so far."""
        self._ready = 0
        """Bytes from the start that need no more."""
        self._looked_up_to = 0
        self._short = False
        self._possible = possible()

    def use(self, appends: Sequence[BlockAppend]) -> None:
        """Note blocks that steps are about to write."""
        for append in appends:
            self._blocks = max(self._blocks, 1 + max(append.block_ids, default=-1))

    def piece(self) -> bool:
        """Ready one piece; False when there is no more to do for now."""
        if not (self._possible and self._blocks):
            return False
        used = self._blocks * self._block_bytes
        target = min(2 * used + HEADROOM_BYTES, len(self._pool))
        begin = max(self._ready, min(used, len(self._pool)))
        if begin >= target or not self._enough_left(begin):
            return False
        end = min(begin + PIECE_BYTES - (self._address + begin) % PIECE_BYTES, len(self._pool))
        if error := headrace_native.populate(self._pool, begin, end - begin):
            log.warning(
                "memory of the KV pool is no longer allocated ahead of use: the system refused (errno %d)", error
            )
            self._possible = False
            return False
        self._ready = end
        return end < target

    def _enough_left(self, begin: int) -> bool:
        if begin < self._looked_up_to:
            return True
        left = self._available()
        if left < self._reserve_bytes + _LOOKS_BYTES:
            if not self._short:
                log.info("no more of the KV pool is allocated ahead of use: %s of memory are left", format_bytes(left))
            self._short = True
            return False
        self._short = False
        self._looked_up_to = begin + _LOOKS_BYTES
        return True
