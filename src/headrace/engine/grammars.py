"""The grammar matchers of an executor's slots; the vocabulary is prepared when the first grammar arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headrace.base.errors import HeadraceError
from headrace.control.step import SlotInit

if TYPE_CHECKING:  # the grammar library is imported with the first grammar, not with every engine
    from headrace.text.grammar import GrammarMatcher, GrammarTokens


class Grammars:
    """One matcher per slot that has a grammar. Faults are returned as text: they end one sequence, never a step."""

    def __init__(self, vocab_size: int, tokens: Callable[[], GrammarTokens]) -> None:
        self._vocab_size = vocab_size
        self._make_tokens = tokens
        self._tokens: GrammarTokens | None = None
        self._matchers: dict[int, GrammarMatcher] = {}

    def admit(self, init: SlotInit) -> str | None:
        """Start the slot's matcher, if it has a grammar, and replay what was generated before; why it failed, or None."""
        self.release(init.slot)
        if init.sampling.grammar is None:
            return None
        try:
            if self._tokens is None:
                self._tokens = self._make_tokens()
            matcher = self._tokens.matcher(init.sampling.grammar, init.sampling.min_tokens)
            for token in init.token_ids[init.prompt_length :]:
                matcher.advance(token)
        except HeadraceError as error:
            return str(error)
        self._matchers[init.slot] = matcher
        return None

    def release(self, slot: int) -> None:
        self._matchers.pop(slot, None)

    def __bool__(self) -> bool:
        """Whether any sequence has one."""
        return bool(self._matchers)

    def follows(self, slot: int) -> bool:
        return slot in self._matchers

    def masks(self, rows: Mapping[int, int]) -> tuple[dict[int, npt.NDArray[np.int32]], dict[int, str]]:
        """Packed masks by row for those of `rows` (slot → row) that have a grammar, and faults by slot."""
        found: dict[int, npt.NDArray[np.int32]] = {}
        faults: dict[int, str] = {}
        if not self._matchers:
            return found, faults
        from headrace.text.grammar import mask_words

        count = mask_words(self._vocab_size)
        for slot, row in rows.items():
            if (matcher := self._matchers.get(slot)) is not None:
                words = np.empty(count, np.int32)
                try:
                    matcher.fill(words)
                except HeadraceError as error:
                    faults[slot] = str(error)
                    continue
                found[row] = words
        return found, faults

    def advance(self, slot: int, token: int) -> str | None:
        """Tell the slot's matcher what was sampled; why it failed, or None."""
        if (matcher := self._matchers.get(slot)) is None:
            return None
        try:
            matcher.advance(token)
        except HeadraceError as error:
            return str(error)
        return None
