"""Wake-ups at exact times: event loops round timers up to a millisecond, which is too coarse for a load generator."""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import itertools
import os
import sys
import time

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = 0o4000
_TFD_CLOEXEC = 0o2000000
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSetting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Ticker:
    """Sleeps until absolute CLOCK_MONOTONIC times (`time.monotonic()` seconds) on the running event loop.

    On Linux one timerfd serves all sleepers and is exact to some tens of microseconds. Elsewhere the loop's own timer
    is used (`exact` is then False), so sends may be up to a millisecond late; latencies stay right, since they are
    counted from the intended time and the lateness is recorded. Use from one event loop only; call `close` at the end.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = int(self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC))
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._fire)

    @property
    def exact(self) -> bool:
        return self._fd >= 0

    async def sleep_until(self, when_s: float) -> None:
        """Return at `when_s` or as soon after as the loop allows; at once if it has passed (the loop still turns once)."""
        if when_s <= time.monotonic():
            await asyncio.sleep(0)
            return
        if not self.exact:
            await asyncio.sleep(when_s - time.monotonic())
            return
        future: asyncio.Future[None] = self._loop.create_future()
        entry = (when_s, next(self._order), future)
        heapq.heappush(self._heap, entry)
        if self._heap[0] is entry:
            self._arm(when_s)
        await future

    def close(self) -> None:
        """Cancel every sleeper and give the timer back."""
        for _, _, future in self._heap:
            future.cancel()
        self._heap.clear()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _arm(self, when_s: float) -> None:
        seconds = int(when_s)
        setting = _TimerSetting(_Timespec(0, 0), _Timespec(seconds, max(1, int((when_s - seconds) * 1e9))))
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(setting), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            future = heapq.heappop(self._heap)[2]
            if not future.done():
                future.set_result(None)
        if self._heap:
            self._arm(self._heap[0][0])
