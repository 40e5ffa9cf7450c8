"""Who may enter: the limit on accepted sequences, the engine's state, and draining."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.control.api import EngineClient
from headrace.serve.errors import bad_field, overloaded, unavailable


class Gate:
    """Counts accepted sequences. Belongs to one event loop.

    At most the engine's batch plus `max_waiting` sequences are inside; one request may bring `max_sequences`.
    """

    def __init__(self, engine: EngineClient, *, max_waiting: int, max_sequences: int) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._max_sequences = max_sequences
        self._inside = 0
        self._mean_stay_s = 1.0
        self._listeners: set[Callable[[], None]] = set()
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def inside(self) -> int:
        """Sequences accepted and not finished."""
        return self._inside

    @property
    def capacity(self) -> int:
        return self._engine.info.max_num_seqs + self._max_waiting

    @contextmanager
    def admit(self, sequences: int, param: str) -> Iterator[None]:
        """Hold places for `sequences` until the block ends; `ApiError` 400, 429 or 503 if they cannot be had."""
        self.check_open()
        limit = min(self._max_sequences, self.capacity)
        if sequences > limit:
            raise bad_field(param, f"{param} asks for {sequences} sequences in one request; the limit here is {limit}.")
        if self._inside + sequences > self.capacity:
            raise overloaded(
                f"The queue is full: {self._inside} sequences are in work or waiting, the limit is {self.capacity}.",
                self._retry_after_s(),
            )
        self._inside += sequences
        self.idle.clear()
        started_s = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._inside -= sequences
            self._mean_stay_s += 0.1 * (asyncio.get_running_loop().time() - started_s - self._mean_stay_s)
            if self._inside == 0:
                self.idle.set()

    @contextmanager
    def on_cut(self, end: Callable[[], None]) -> Iterator[None]:
        """While the block runs, `end` is called if the server cannot wait for this work any longer."""
        self._listeners.add(end)
        try:
            yield
        finally:
            self._listeners.discard(end)

    def cut(self) -> None:
        """The time for draining is over: end everything that is still inside."""
        for end in list(self._listeners):
            end()

    def check_open(self) -> None:
        """Raise `ApiError` 503 unless new work can be taken."""
        if self.draining:
            raise unavailable("The server is shutting down and takes no new requests.", 5, "draining")
        match self._engine.state:
            case "ready":
                return
            case "dead":
                raise unavailable("The engine has failed and cannot be restarted.", 60, "engine_dead")
            case state:
                raise unavailable(f"The engine is {state}; try again shortly.", 2, "engine_not_ready")

    def _retry_after_s(self) -> int:
        # about one place in `max_num_seqs` frees up per mean stay; a client that waits that long has a fair chance
        return min(60, max(1, math.ceil(self._mean_stay_s / self._engine.info.max_num_seqs)))
