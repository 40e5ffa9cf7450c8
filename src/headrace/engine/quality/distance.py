"""How far apart two distributions over the vocabulary are, row by row, and a file of the reference's rows."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.base.errors import DoesNotFit
from headrace.base.units import format_bytes

Rows = npt.NDArray[np.float32]

IN_CACHE = 1 << 18
"""Logits of one distribution that are worked on at once: six arrays of so many fp32 stay near the core."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Per row: KL divergence of the other distribution from the reference (natural log), and whether the argmax moved."""

    kl: npt.NDArray[np.float64]
    flipped: npt.NDArray[np.bool_]


def distance(reference: Rows, other: Rows) -> Distance:
    """KL(reference ‖ other) = Σ p (log p − log q) over the whole vocabulary, both given as logits [rows, vocab]."""
    at_once = max(1, IN_CACHE // reference.shape[1])
    kl = [_kl(reference[i : i + at_once], other[i : i + at_once]) for i in range(0, len(reference), at_once)]
    return Distance(np.concatenate([np.empty(0), *kl]), reference.argmax(-1) != other.argmax(-1))


def _kl(reference: Rows, other: Rows) -> npt.NDArray[np.float64]:
    log_p, log_q = _log_softmax(reference), _log_softmax(other)
    p = np.exp(log_p)
    with np.errstate(invalid="ignore"):  # a token that neither allows: −inf − −inf, with weight 0
        terms = np.where(p > 0, p * (log_p - log_q), 0)
    return terms.sum(-1, dtype=np.float64)


def _log_softmax(logits: Rows) -> Rows:
    shifted = logits - logits.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1, dtype=np.float64, keepdims=True)
    return shifted - np.log(total).astype(np.float32)


class LogitsFile:
    """fp32 logits [rows, vocab] of the reference in an unnamed file of `folder`; gone when it is closed."""

    def __init__(self, rows: int, vocab: int, folder: Path) -> None:
        self.nbytes = rows * vocab * 4
        free = shutil.disk_usage(folder).free
        if self.nbytes > 0.9 * free:
            raise DoesNotFit(
                f"logits of {rows:,} tokens over {vocab:,} take {format_bytes(self.nbytes)}, {folder} has "
                f"{format_bytes(free)} free",
                field="tokens",
                remedy=f"set it to {max(1, int(0.9 * free) // (4 * vocab))} or less, or name another scratch folder",
            )
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `close`
        self._file.truncate(self.nbytes)
        self._rows = np.memmap(self._file, np.float32, "r+", shape=(rows, vocab))

    def write(self, first: int, rows: Rows) -> None:
        self._rows[first : first + len(rows)] = rows

    def read(self, first: int, count: int) -> Rows:
        return np.asarray(self._rows[first : first + count])

    def close(self) -> None:
        del self._rows
        self._file.close()
