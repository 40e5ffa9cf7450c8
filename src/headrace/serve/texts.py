"""Tokenizing and templating off the event loop, so that one huge prompt delays nobody's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class TextThreads:
    """A few threads for work on text, started when first needed; `close` ends them until then."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`; cancelling the wait lets a call that has begun finish unheard."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="text")
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args, **kwargs))

    def close(self) -> None:
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.shutdown(wait=False, cancel_futures=True)
