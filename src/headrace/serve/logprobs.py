"""Log-probabilities in the two shapes of OpenAI's API, and prompt log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.control.step import TokenLogprobs
from headrace.serve.generation import Token
from headrace.text.tokenizer import Tokenizer

_FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's API does the same."""


def chat_logprobs(tokens: Sequence[Token], tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    """`logprobs` of a chat choice. `token` is the token's share of the text, `bytes` its exact bytes."""
    return {"content": [_chat_token(token, tokenizer, top) for token in tokens], "refusal": None}


def _chat_token(token: Token, tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    entry = token.logprob
    alternatives = [] if entry is None else list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:top]
    return {
        "token": token.text,
        "logprob": _FLOOR if entry is None else _finite(entry.logprob),
        "bytes": list(token.raw),
        "top_logprobs": [
            {"token": tokenizer.token_text(i), "logprob": _finite(value), "bytes": list(tokenizer.token_bytes(i))}
            for i, value in alternatives
        ],
    }


class CompletionLogprobs:
    """`logprobs` of one text completion, built up in order: prompt tokens first if they are echoed."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0

    def take(self, tokens: Sequence[tuple[str, TokenLogprobs | None]]) -> dict[str, Any]:
        """The entries of the next tokens; `text_offset` counts characters from the start of the returned text."""
        offsets: list[int] = []
        for text, _ in tokens:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for _, entry in tokens],
            "top_logprobs": [self._alternatives(text, entry) for text, entry in tokens],
            "text_offset": offsets,
        }

    def _alternatives(self, text: str, entry: TokenLogprobs | None) -> dict[str, float] | None:
        if entry is None:
            return None
        pairs = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[: self._top]
        named = {self._tokenizer.token_text(i): _finite(value) for i, value in pairs}
        if entry.token_id not in entry.top_ids[: self._top]:
            named.setdefault(text, _finite(entry.logprob))
        return named


def joined_logprobs(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What one `take` of all tokens would have given."""
    return {
        key: [item for part in parts for item in part[key]]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }


def prompt_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, top: int) -> list[dict[str, Any] | None]:
    """One entry per prompt token, the first null: token id to log-probability, rank and text."""
    return [None, *(_prompt_token(entry, tokenizer, top) for entry in entries)]


def _prompt_token(entry: TokenLogprobs, tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    named = {entry.token_id: (entry.logprob, entry.rank)}
    for rank, (i, value) in enumerate(zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True), start=1):
        named.setdefault(i, (value, rank))
    return {
        str(i): {"logprob": _finite(value), "rank": rank, "decoded_token": tokenizer.token_text(i)}
        for i, (value, rank) in named.items()
    }


def _finite(value: float) -> float:
    return max(value, _FLOOR)
