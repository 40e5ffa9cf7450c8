"""Waits that are mostly none, run without a task."""

from __future__ import annotations

import types
from collections.abc import Awaitable, Generator
from typing import Any


def begun(work: Awaitable[None]) -> Awaitable[None] | None:
    """Run `work` until it has to wait. None if it has ended without, else what to await for the rest of it.

    That first part runs outside of any task, so `work` may ask for the running loop but not for the current task.
    """
    steps = work.__await__()
    try:
        waits_for = steps.send(None)
    except StopIteration:
        return None
    return _rest(steps, waits_for)


@types.coroutine
def _rest(steps: Generator[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """What `await work` would have done from there on: futures out to the task, its results and exceptions in."""
    try:
        while True:
            try:
                result = yield waits_for
            except BaseException as error:
                waits_for = steps.throw(error)
            else:
                waits_for = steps.send(result)
    except StopIteration:
        return
