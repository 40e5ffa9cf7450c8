"""What a technique does to the words: greedy answers that change, and the perplexity of a fixed text, over HTTP."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import aiohttp
import msgspec

from headrace.bench.endpoint import Endpoint

PROMPTS = (
    "The three states of matter are",
    "To make a cup of tea, first",
    "The largest planet of the solar system is",
    "In 1969 the first people landed on the Moon. The mission",
    "A good bridge must be strong because",
    "Water boils at a lower temperature on a mountain, since",
    "The recipe needs flour, eggs and",
    "A computer stores numbers as",
)
_TOKENS = 32


class Quality(msgspec.Struct, frozen=True):
    """Answers to the fixed prompts, and the perplexity of the fixed text (None where the endpoint cannot tell)."""

    answers: tuple[str, ...]
    perplexity: float | None = None
    why_no_perplexity: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """One quality against a reference: share of answers that are equal, mean words until they part, perplexity ratio."""

    equal_share: float
    words_until_different: float
    perplexity_ratio: float | None


def fixed_text() -> str:
    """The opening of Lincoln's address at Gettysburg (1863, public domain)."""
    return files("headrace.bench").joinpath("gettysburg.txt").read_text(encoding="utf-8").strip()


async def probe_quality(endpoint: Endpoint) -> Quality:
    """Ask the endpoint's `/v1/completions` the fixed prompts greedily, one at a time, and score the fixed text."""
    timeout = aiohttp.ClientTimeout(total=endpoint.timeout_s)
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, headers=dict(endpoint.headers), connector=connector) as session:
        answers = []
        for prompt in PROMPTS:
            body = {"model": endpoint.model, "prompt": prompt, "max_tokens": _TOKENS, "temperature": 0.0}
            status, answer = await _post(session, endpoint, body)
            answers.append(str(answer["choices"][0]["text"]) if status == 200 else f"<{status}>")
        body = {"model": endpoint.model, "prompt": fixed_text(), "max_tokens": 1, "temperature": 0.0}
        status, answer = await _post(session, endpoint, body | {"echo": True, "logprobs": 1})
        try:
            scores = answer["choices"][0]["logprobs"]["token_logprobs"][:-1]
            known = [score for score in scores if score is not None]
            return Quality(tuple(answers), math.exp(-sum(known) / len(known)))
        except (KeyError, TypeError, ZeroDivisionError):
            return Quality(tuple(answers), None, "the endpoint does not echo log-probabilities")


async def _post(session: aiohttp.ClientSession, endpoint: Endpoint, body: dict[str, Any]) -> tuple[int, Any]:
    async with session.post(endpoint.url + "/v1/completions", json=body) as response:
        try:
            return response.status, await response.json(content_type=None)
        except ValueError:
            return response.status, {}


def compare(reference: Quality, found: Quality) -> Change:
    """How far `found` is from `reference`."""
    pairs = list(zip(reference.answers, found.answers, strict=True))
    until = [_same_words(a, b) for a, b in pairs]
    ratio = None
    if reference.perplexity and found.perplexity:
        ratio = found.perplexity / reference.perplexity
    return Change(sum(a == b for a, b in pairs) / len(pairs), sum(until) / len(until), ratio)


def _same_words(a: str, b: str) -> int:
    words_a, words_b = a.split(), b.split()
    differing = (k for k, (x, y) in enumerate(zip(words_a, words_b, strict=False)) if x != y)
    return next(differing, min(len(words_a), len(words_b)))
