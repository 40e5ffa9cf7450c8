"""Prompts with a known number of tokens: text made of words that are one token each on the endpoint's tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from random import Random


@cache
def common_words() -> tuple[str, ...]:
    """256 common English words; on most tokenizers each is one token after a space."""
    return tuple(files("headrace.bench").joinpath("words.txt").read_text(encoding="utf-8").split())


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Writes text of a given token count.

    `tokens_per_word` is measured on the endpoint (exactly 1 for most tokenizers); `count` is the tokenizer itself where
    it is known, and then every text is corrected until its count is exact. `template_tokens`: what the endpoint adds to
    a one-message chat, `message_tokens`: what each further message adds. `source` says how the counts were established.
    """

    words: tuple[str, ...]
    tokens_per_word: float = 1.0
    template_tokens: int = 0
    message_tokens: int = 0
    count: Callable[[str], int] | None = None
    source: str = "one token per word, not verified"

    def text(self, source: Random, tokens: int) -> str:
        """About `tokens` tokens of random words; exactly that many where the tokenizer is known."""
        if tokens <= 0:
            return ""
        chosen = source.choices(self.words, k=max(1, round(tokens / self.tokens_per_word)))
        if self.count is not None:
            chosen = self._corrected(source, chosen, tokens)
        return " ".join(chosen)

    def tokens_of(self, text: str) -> int:
        """Tokens of a text: exact where the tokenizer is known, else its words at the measured rate."""
        return self.count(text) if self.count is not None else round(len(text.split()) * self.tokens_per_word)

    def unique(self, tag: int, salt: str) -> str:
        """Three words that no other `tag` of the run starts with, so that no prefix cache can serve a prompt."""
        base = len(self.words)
        value = (tag * 7919 + Random(f"unique/{salt}").randrange(base**3)) % base**3
        return " ".join((self.words[value % base], self.words[value // base % base], self.words[value // base**2]))

    def unique_text(self, source: Random, tokens: int, tag: int, salt: str) -> str:
        """Text of `tokens` tokens that starts with the unique words of `tag` (as many of them as fit)."""
        head = self.unique(tag, salt).split()[: max(1, tokens)]
        body = self.text(source, tokens - round(len(head) * self.tokens_per_word))
        return " ".join((*head, body)) if body else " ".join(head)

    def _corrected(self, source: Random, chosen: list[str], tokens: int) -> list[str]:
        assert self.count is not None
        for _ in range(16):
            excess = self.count(" ".join(chosen)) - tokens
            if excess == 0:
                break
            if excess > 0:
                chosen = chosen[: max(1, len(chosen) - excess)]
            else:
                chosen = chosen + source.choices(self.words, k=-excess)
        return chosen
