"""A long text as overlapping windows, so that every token is scored once and, but for the first ones, with context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Window:
    """Token ids, of which those from index `first` on are scored; the rest is context that another window scores."""

    tokens: tuple[int, ...]
    first: int

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.first


def windows(tokens: Sequence[int], size: int, stride: int, prefix: Sequence[int] = ()) -> list[Window]:
    """Windows of `size` tokens, each `stride` further than the one before; the last may move on by less.

    `prefix` (what the tokenizer puts before a text) opens each of them and counts. Without one the text's first token has
    nothing to be predicted from and is not scored. Raises InvalidInput for sizes that leave nothing to score.
    """
    room = size - len(prefix)
    most = size - max(1, len(prefix))  # a window's first token is predicted from nothing
    if not 0 < stride <= most:
        raise InvalidInput(
            f"must be from 1 to the {most} tokens that a window of {size} can score, got {stride}", field="stride"
        )
    if len(tokens) + len(prefix) < 2:
        raise InvalidInput("the text has too few tokens to score any", field="text")
    found = []
    done = 0 if prefix else 1
    end = min(room, len(tokens))
    while True:
        begin = max(0, end - room)
        found.append(Window((*prefix, *tokens[begin:end]), len(prefix) + done - begin))
        if end == len(tokens):
            return found
        done, end = end, min(end + stride, len(tokens))
