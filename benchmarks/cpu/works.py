"""The work every engine gets: slices of English text as token ids, so that each sees byte-identical requests."""

from __future__ import annotations

import pydoc_data.topics
import random
from collections.abc import Callable
from dataclasses import dataclass

from headrace.spec.locate import locate
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Work:
    """Requests (prompt ids, output tokens) sent with at most `concurrency` in flight."""

    name: str
    concurrency: int
    requests: list[tuple[list[int], int]]


def corpus() -> list[int]:
    """Token ids of the Python language reference as CPython ships it (about 200,000 tokens of English)."""
    files = locate("smollm2-135m")
    tokenizer = Tokenizer.from_gguf(files.gguf().metadata)
    text = "\n\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    return [i for i in tokenizer.encode(text, add_special=False) if i >= 17]


class Slices:
    """Random slices of the corpus; a seed fixes them, and no two works share text that a prefix cache could answer."""

    def __init__(self, ids: list[int], seed: int) -> None:
        self.ids, self.random = ids, random.Random(seed)

    def take(self, count: int) -> list[int]:
        start = self.random.randrange(len(self.ids) - count)
        return self.ids[start : start + count]


def single(ids: list[int], repeat: int) -> Work:
    """One stream: 128 in, 128 out."""
    return Work("single", 1, [(Slices(ids, 1000 + repeat).take(128), 128)])


def prefill(ids: list[int], repeat: int) -> Work:
    """1,024 in, one token out."""
    return Work("prefill", 1, [(Slices(ids, 2000 + repeat).take(1024), 1)])


def _concurrent(name: str, concurrency: int, ids: list[int], repeat: int, seed: int) -> Work:
    lengths = random.Random(0)
    cut = Slices(ids, seed + repeat)
    return Work(name, concurrency, [(cut.take(lengths.randint(64, 256)), 128) for _ in range(64)])


def concurrent8(ids: list[int], repeat: int) -> Work:
    """64 requests of 64-256 in, 128 out, 8 at a time."""
    return _concurrent("c8", 8, ids, repeat, 3000)


def concurrent32(ids: list[int], repeat: int) -> Work:
    """The same, 32 at a time."""
    return _concurrent("c32", 32, ids, repeat, 5000)


def prefix(ids: list[int], repeat: int) -> Work:
    """32 requests that share 512 tokens, 32 of their own each, 64 out, 8 at a time."""
    cut = Slices(ids, 4000 + repeat)
    shared = cut.take(512)
    return Work("prefix", 8, [(shared + cut.take(32), 64) for _ in range(32)])


WORKS: dict[str, Callable[[list[int], int], Work]] = {
    "single": single,
    "prefill": prefill,
    "c8": concurrent8,
    "c32": concurrent32,
    "prefix": prefix,
}
