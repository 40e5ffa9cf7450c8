"""What a sampler is given and what it gives back; torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.control.step import TokenLogprobs

NOT_FINITE = "the model produced logits that are not finite numbers"
NOTHING_ALLOWED = "every token is excluded by logit_bias, min_tokens or the grammar"


class Rows(msgspec.Struct, frozen=True):
    """The rows to sample. `history[i]` are the tokens before row i's, the first `prompt_lengths[i]` of them the prompt.

    `masks`: packed grammar masks by row (int32 words, bit set: allowed). `lengths`: of the histories, if they are known.
    """

    slots: npt.NDArray[np.int64]
    history: Sequence[npt.NDArray[np.int32]]
    prompt_lengths: npt.NDArray[np.int64]
    masks: dict[int, npt.NDArray[np.int32]]
    lengths: npt.NDArray[np.int64] | None = None

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """Index of the token each row generates within its sequence's output."""
        if self.lengths is not None:
            return self.lengths - self.prompt_lengths
        return np.fromiter((len(h) for h in self.history), np.int64, len(self.history)) - self.prompt_lengths


class Sampled(msgspec.Struct, frozen=True):
    """`token_ids` [rows]; `errors` and `logprobs` by row, where there are any."""

    token_ids: list[int]
    errors: dict[int, str]
    logprobs: dict[int, TokenLogprobs]
