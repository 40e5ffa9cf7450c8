"""Logprobs as OpenAI's API writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headrace.text.stream import TextToken
from headrace.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for log 0, which JSON cannot hold; OpenAI's documented value for a very unlikely token."""


class Logprobs(Protocol):
    """One token's logprobs with the alternatives at its position, best first (`control.step.TokenLogprobs`)."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top_ids(self) -> Sequence[int]: ...
    @property
    def top_logprobs(self) -> Sequence[float]: ...


def chat_logprobs(tokens: Sequence[TextToken[Any]], tokenizer: Tokenizer, top: int) -> list[dict[str, Any]]:
    """The `content` entries of a chat choice's `logprobs`, each with its `top` best alternatives.

    `token` is the token's share of the text, so the joined tokens are the text of the chunk; `bytes` are the token's
    raw bytes, from which a client can rebuild a character that spans tokens. Tokens without logprobs are left out.
    """
    return [
        {
            "token": token.text,
            "logprob": _finite(token.logprob.logprob),
            "bytes": list(token.raw),
            "top_logprobs": [
                {
                    "token": tokenizer.token_text(id_),
                    "logprob": _finite(value),
                    "bytes": list(tokenizer.token_bytes(id_)),
                }
                for id_, value in _best(token.logprob, top)
            ],
        }
        for token in tokens
        if token.logprob is not None
    ]


def completion_logprobs(
    tokens: Sequence[TextToken[Any]], tokenizer: Tokenizer, top: int, *, start: int = 0
) -> dict[str, list[Any]]:
    """The `logprobs` object of a completion choice.

    `start`: characters of the choice's text before offset 0 of these tokens (the echoed prompt). A token without
    logprobs, as the first of a prompt, has null. The alternatives include the chosen token itself, as OpenAI's do, so
    there may be `top` + 1.
    """
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [None if token.logprob is None else _finite(token.logprob.logprob) for token in tokens],
        "top_logprobs": [_alternatives(token.logprob, tokenizer, top) for token in tokens],
        "text_offset": [start + token.offset for token in tokens],
    }


def _alternatives(logprobs: Logprobs | None, tokenizer: Tokenizer, top: int) -> dict[str, float] | None:
    if logprobs is None or top == 0:
        return None
    ranked = [*_best(logprobs, top), (logprobs.token_id, logprobs.logprob)]
    found: dict[str, float] = {}
    for id_, value in ranked:  # two ids may have one spelling; the likelier stands first
        found.setdefault(tokenizer.token_text(id_), _finite(value))
    return found


def _best(logprobs: Logprobs, top: int) -> list[tuple[int, float]]:
    return list(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))[:top]


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
