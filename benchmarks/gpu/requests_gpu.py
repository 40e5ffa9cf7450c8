"""The requests of the GPU comparison, as token ids below 31,990, so that every engine gets the same bytes."""

from __future__ import annotations

import random

VOCAB = 31990
Ask = tuple[list[int], int]
"""A prompt and how many tokens to generate."""


def mixed(count: int = 256, seed: int = 0, prompt=(128, 1024), output=(128, 512)) -> list[Ask]:
    """Unrelated prompts of uniformly drawn lengths, answers likewise."""
    rng = random.Random(seed)
    return [
        ([rng.randrange(3, VOCAB) for _ in range(rng.randint(*prompt))], rng.randint(*output)) for _ in range(count)
    ]


def prefix(count: int = 64, shared: int = 2048, own: int = 64, output: int = 128, seed: int = 1) -> list[Ask]:
    """Prompts that begin with the same tokens."""
    rng = random.Random(seed)
    common = [rng.randrange(3, VOCAB) for _ in range(shared)]
    return [(common + [rng.randrange(3, VOCAB) for _ in range(own)], output) for _ in range(count)]


def single(length: int, seed: int) -> list[int]:
    """One prompt."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]
