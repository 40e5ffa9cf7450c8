"""What the events of a streamed answer have in common, whether it is a chat's or a completion's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from headrace.serve.front import Batch, JsonDict, TextEvent
from headrace.serve.generation import Ending
from headrace.serve.protocol.sampling import SamplingFields


class Writer(Protocol):
    """Of one choice: how its sequence ended, once it has."""

    ending: Ending | None


class Chunks:
    """The head of every chunk, and what ends a stream: usage, if it was asked for, and `explain`, on whichever chunk is the last."""

    def __init__(self, batch: Batch, writers: Sequence[Writer], request: SamplingFields, head: JsonDict) -> None:
        self._head = head
        options = request.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._with_counts = options is not None and bool(options.continuous_usage_stats)
        self._explain = bool(request.explain)
        self._batch = batch
        self._ending_of = writers

    def chunk(self, choice: JsonDict) -> JsonDict:
        return {**self._head, "choices": [choice], **({"usage": None} if self._with_usage else {})}

    def text_event(self, index: int, choice: JsonDict, field: str) -> TextEvent:
        """Chunks of choice `index` that differ in their text, and in what is counted if that was asked for."""
        return TextEvent(self.chunk(choice), field, self._prompt_tokens(index) if self._with_counts else None)

    def count(self, chunk: JsonDict, index: int, completion_tokens: int) -> None:
        """Put the tokens of choice `index` so far on its chunk, if that was asked for."""
        if self._with_counts:
            prompt = self._prompt_tokens(index)
            total = prompt + completion_tokens
            chunk["usage"] = {"prompt_tokens": prompt, "completion_tokens": completion_tokens, "total_tokens": total}

    def _prompt_tokens(self, index: int) -> int:
        return len(self._batch.prompts[index // self._batch.n])

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
