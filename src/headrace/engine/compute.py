"""The seam between the steps of an executor and the arithmetic of a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.control.step import TokenLogprobs
from headrace.engine.batch import Batch, Ints
from headrace.engine.sampler.rows import Rows, Sampled
from headrace.engine.sampler.state import SamplingState


class Compute(Protocol):
    """One model with its KV pool, as `engine.steps` drives it; called by one thread at a time.

    Logits are the backend's own arrays, fp32 [rows, vocab]; they stay valid until the next call.
    """

    vocab_size: int

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole KV blocks, all layers."""
        ...

    def hidden(self, batch: Batch, rows: Ints, begun: Callable[[], None]) -> npt.NDArray[np.int64]:
        """Run all layers, write keys and values, and keep the hidden states of token rows `rows` (each at most once) for
        `logits`. Returns the chunks (indices) in which something was not a finite number. Calls `begun` once everything is
        prepared and arithmetic begins."""
        ...

    def discard(self, blocks: Sequence[int]) -> None:
        """Make harmless what a failed sequence leaves in its blocks to their next owners."""
        ...

    def logits(self, first: int, count: int) -> Any:
        """Logits of the kept rows first, first + 1, …"""
        ...

    def sample(self, logits: Any, rows: Rows, state: SamplingState) -> Sampled:
        """Sample each row of `logits`, which may be changed."""
        ...

    def token_logprobs(
        self, logits: Any, ids: npt.NDArray[np.int64], wanted: Sequence[int]
    ) -> list[TokenLogprobs] | None:
        """Log-probability and rank of `ids` and the `wanted[i]` best alternatives; None if logits are not finite."""
        ...
