"""Multiple choice scored by log-likelihood: which of four answers the model finds most likely after the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.text.tokenizer import Tokenizer


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question, its choices, and the index of the right one."""

    question: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """The ids of a question with one of its choices; the choice's own begin at `first`. `size`: its UTF-8 bytes."""

    question: int
    tokens: tuple[int, ...]
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class Picks:
    """Index of the picked choice per question: by log-likelihood, and by log-likelihood per byte of the choice."""

    raw: npt.NDArray[np.int64]
    normalized: npt.NDArray[np.int64]


def built_in() -> list[Question]:
    """Questions of general knowledge and common sense, written for this package."""
    lines = files("headrace.engine.quality").joinpath("questions.jsonl").read_bytes()
    return msgspec.json.Decoder(Question).decode_lines(lines)


def candidates(questions: Sequence[Question], tokenizer: Tokenizer) -> list[Candidate]:
    """Each question with each choice, in order. Question and choice are tokenized together, as a reader would see them;
    the choice begins where the ids leave those of the question alone."""
    found = []
    for i, q in enumerate(questions):
        stem = f"Question: {q.question}\nAnswer:"
        alone = tokenizer.encode(stem)
        for choice in q.choices:
            tokens = tokenizer.encode(f"{stem} {choice}")
            pairs = zip(alone, tokens[:-1], strict=False)
            first = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(alone), len(tokens) - 1))
            found.append(Candidate(i, tuple(tokens), max(1, first), len(choice.encode())))
    return found


def picks(asked: Sequence[Candidate], logprobs: Sequence[npt.NDArray[np.float64]]) -> Picks:
    """What is picked, from the log-probabilities of each candidate's tokens after the first."""
    total = np.array([float(row[c.first - 1 :].sum()) for c, row in zip(asked, logprobs, strict=True)])
    size = np.array([c.size for c in asked])
    bounds = np.flatnonzero(np.diff([c.question for c in asked])) + 1
    return Picks(
        np.array([int(part.argmax()) for part in np.split(total, bounds)]),
        np.array([int(part.argmax()) for part in np.split(total / size, bounds)]),
    )
