"""Seeds of the several answers to one prompt."""

from __future__ import annotations

import hashlib
import os


def choice_seed(seed: int | None, choice: int) -> int:
    """Seed of the choice-th answer to one prompt: fixed by the request's seed, random without one.

    It does not depend on the prompt's place in a list, so a prompt is answered the same alone and in company.
    """
    if seed is None:
        return int.from_bytes(os.urandom(8), "big") >> 1
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
