"""Clocks as arguments, so that the same scheduler runs on real and on simulated time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary origin, never decreasing."""

    def now(self) -> float: ...


class SystemClock:
    """CLOCK_MONOTONIC: comparable between processes of one host."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to; used by the planner's simulation and by tests."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance_to(self, when: float) -> None:
        """Move to `when`; moving backwards is a programming error."""
        if when < self._now:
            raise ValueError(f"clock cannot go back from {self._now} to {when}")
        self._now = when

    def advance(self, seconds: float) -> None:
        self.advance_to(self._now + seconds)
