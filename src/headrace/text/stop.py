"""Stop strings, found in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import InvalidInput


class StopMatcher:
    """Finds the first stop string in a text given piece by piece, and says how much of the text is safe to show.

    The first match is the one that is complete first, as the text is read character by character; of several complete
    at the same character the longest wins, so nothing of an overlapping stop string is shown. The result depends on
    the text alone, not on how it was cut into pieces.

    `safe`: characters from the start that belong to no match and can no longer become part of one. Once `matched` is
    set, `safe` is where the text ends: before the stop string, or after it with `include_stop`.

    One pass with an Aho-Corasick automaton (Aho, Corasick: Efficient String Matching, 1975): constant time per
    character, whatever the number of stop strings. Raises `InvalidInput` for an empty stop string.
    """

    __slots__ = (
        "_depth",
        "_fallback",
        "_longest",
        "_next",
        "_read",
        "_state",
        "include_stop",
        "matched",
        "safe",
        "strings",
    )

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise InvalidInput("a stop string is empty", field="stop", remedy="leave it out, or give its text")
        self.include_stop = include_stop
        self.strings = len(stops)
        """How many are looked for."""
        self.matched: str | None = None
        self.safe = 0
        self._read = 0
        self._state = 0
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        self._longest: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()

    def read(self, text: str, *, may_stop: bool = True) -> None:
        """Take the next piece of the text. Reads nothing more after a match.

        With `may_stop` False a stop string that is complete within this piece is passed over (used until `min_tokens`
        tokens are there); one that only begins here still counts when a later piece completes it.
        """
        if self.matched is not None:
            return
        if not self.strings:
            self._read += len(text)
            self.safe = self._read
            return
        state = self._state
        for character in text:
            self._read += 1
            while state and character not in self._next[state]:
                state = self._fallback[state]
            state = self._next[state].get(character, 0)
            found = self._longest[state]
            if found is not None and may_stop:
                self.matched = found
                self.safe = self._read if self.include_stop else self._read - len(found)
                return
        self._state = state
        self.safe = self._read if self.include_stop else self._read - self._held(state)

    def finish(self) -> None:
        """The text has ended: a stop string that had only begun is ordinary text."""
        if self.matched is None:
            self.safe = self._read

    def _held(self, state: int) -> int:
        """Characters at the end of what was read that could begin a stop string."""
        while state and not self._next[state]:  # a whole stop string that was passed over begins nothing longer
            state = self._fallback[state]
        return self._depth[state]

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[state] + 1)
                self._longest.append(None)
            state = self._next[state][character]
        self._longest[state] = stop

    def _link(self) -> None:
        """Point each state at the longest proper suffix that is a state too, breadth first."""
        queue = list(self._next[0].values())
        for state in queue:
            for character, child in self._next[state].items():
                fallback = self._fallback[state]
                while fallback and character not in self._next[fallback]:
                    fallback = self._fallback[fallback]
                self._fallback[child] = self._next[fallback].get(character, 0)
                queue.append(child)
            # A state is longer than what it falls back to, so its own stop string is the longest ending here.
            self._longest[state] = self._longest[state] or self._longest[self._fallback[state]]
