"""What the events of a streamed answer have in common, whether it is a chat's or a completion's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from headrace.serve.front import Batch, JsonDict
from headrace.serve.generation import Ending
from headrace.serve.protocol.sampling import SamplingFields


class Writer(Protocol):
    """Of one choice: how its sequence ended, once it has."""

    ending: Ending | None


class Chunks:
    """The head of every chunk, and what ends a stream: usage, if it was asked for, and `explain`, on whichever chunk is the last."""

    def __init__(self, batch: Batch, writers: Sequence[Writer], request: SamplingFields, head: JsonDict) -> None:
        self._head = head
        self._with_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
        self._explain = bool(request.explain)
        self._batch = batch
        self._ending_of = writers

    def chunk(self, choice: JsonDict) -> JsonDict:
        return {**self._head, "choices": [choice], **({"usage": None} if self._with_usage else {})}

    def ended(self, last: JsonDict) -> None:
        """The last chunk of a choice: if it is the stream's last, `explain` is put on it."""
        if self._explain and not self._with_usage and all(w.ending is not None for w in self._ending_of):
            last["explain"] = self._batch.explanation(self._endings())

    def end(self) -> list[bytes]:
        if not self._with_usage:
            return []
        last: JsonDict = {**self._head, "choices": [], "usage": self._batch.usage(self._endings())}
        if self._explain:
            last["explain"] = self._batch.explanation(self._endings())
        return [msgspec.json.encode(last)]

    def _endings(self) -> list[Ending]:
        return [writer.ending for writer in self._ending_of if writer.ending is not None]
