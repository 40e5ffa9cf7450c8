"""A stopwatch per request whose parts add up to the whole, exactly."""

from __future__ import annotations

from enum import IntEnum

# Time is kept in whole ticks of 2^-20 s: each part, and any sum of parts, is then an exact float.
_TICKS_PER_S = 1 << 20


def ticks(seconds: float) -> int:
    return int(seconds * _TICKS_PER_S)


def seconds(count: int) -> float:
    return count / _TICKS_PER_S


class Part(IntEnum):
    """Where a request is: waiting for its first step, before its first token, after it, or evicted."""

    QUEUE = 0
    PREFILL = 1
    DECODE = 2
    PREEMPTED = 3


class Stopwatch:
    """Charges all time since `start` (in ticks) to one part at a time."""

    __slots__ = ("_since", "part", "spent")

    def __init__(self, start: int) -> None:
        self.part = Part.QUEUE
        self.spent = [0, 0, 0, 0]
        self._since = start

    def enter(self, part: Part, now: int) -> None:
        """Charge the time until `now` to the present part and go on in `part`."""
        # A front-end's clock reading may be a tick ahead of ours; time never runs backwards in a report.
        if now > self._since:
            self.spent[self.part] += now - self._since
            self._since = now
        self.part = part
