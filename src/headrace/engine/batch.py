"""Slots: the persistent buffers of an executor, and the arrays of one step cut from them.

All of a step's indices are made by whole-array operations; only what a plan changes (inits, appends) is visited one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.control.node import encode
from headrace.control.step import BlockAppend, Chunk, SlotInit
from headrace.spec.cache import CacheLayout

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spans:
    """The sequences of one step as one cache group sees them, in the order of the step's token rows.

    Sequence i computes positions starts[i] … starts[i] + lengths[i] - 1; its rows follow each other from first_rows[i].
    tables[i, j] is the block of positions j * block_tokens …; an entry behind the window is -1 and must not be read.
    Every position up to the sequence's end is already written to the cache when `attend` runs.
    """

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    first_rows: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    block_tokens: int


class Batch:
    """One step's chunks as arrays, not to be written to. Rows [tokens]: `tokens` (ids in 32 bits), `token_ids` (in 64),
    `positions`, and per cache group `write_slots`.

    Per chunk: `slots`, `starts`, `lengths`, `first_rows`; `tables` per cache group. `tail_slots`: token slots behind the
    last written position of blocks that were begun in this step, to be zeroed. Tables, 64-bit ids and both kinds of token slots
    are computed when they are asked for, within the step.
    """

    __slots__ = (
        "_of", "_replaced", "_row_slots", "_tables", "_write_slots", "block_tokens", "first_rows", "lengths", "positions", "slots",
        "starts", "tokens",
    )  # fmt: skip

    def __init__(self, of: Slots, chunks: Sequence[Chunk], replaced: set[tuple[int, int, int]]) -> None:
        """`replaced`: (group, slot, logical block) of blocks that are new in this step."""
        count = len(chunks)
        self.slots = slots = of.rows_of([c.slot for c in chunks])
        self.starts = starts = np.array([c.start for c in chunks], np.int64)
        lengths = [c.length for c in chunks]
        self.lengths = np.array(lengths, np.int64)
        if max(lengths) == 1:
            # Not arange: it lets go of the interpreter, and the engine's loop, just woken by the last step's end, takes it.
            self.first_rows, self.positions, row_slots = of.counting[:count], starts, slots
        else:
            ends_at = np.cumsum(self.lengths)
            self.first_rows = ends_at - self.lengths
            owner = np.repeat(np.arange(count), self.lengths)
            self.positions = np.arange(int(ends_at[-1])) - self.first_rows[owner] + starts[owner]
            row_slots = slots[owner]
        self.tokens: npt.NDArray[np.int32] = of.tokens[row_slots, self.positions]
        self._tables: list[npt.NDArray[np.int32]] | None = None
        self.block_tokens = of.block_tokens
        self._of = of
        self._row_slots = row_slots
        self._replaced = replaced
        self._write_slots: list[Ints] | None = None

    @property
    def token_ids(self) -> Ints:
        return self.tokens.astype(np.int64)

    @property
    def tables(self) -> list[npt.NDArray[np.int32]]:
        if self._tables is None:
            self._tables = [table[self.slots] for table in self._of.tables]
        return self._tables

    def first_blocks(self, width: int) -> npt.NDArray[np.int32]:
        """The first `width` columns of all `tables` [groups, chunks, width]."""
        first = [table[self.slots, :width] for table in self._of.tables]
        return first[0][None] if len(first) == 1 else np.stack(first)

    @property
    def write_slots(self) -> list[Ints]:
        if self._write_slots is None:
            block_at, offset = self.positions // self.block_tokens, self.positions % self.block_tokens
            rows, size = self._row_slots, self.block_tokens
            self._write_slots = [table[rows, block_at].astype(np.int64) * size + offset for table in self._of.tables]
        return self._write_slots

    @property
    def tail_slots(self) -> Ints:
        """What lies behind a sequence's end in its last block was left by an earlier owner and may not be finite; masked
        keys are still multiplied (by zero), so such a tail is zeroed when its block is begun."""
        slots, size, replaced = self.slots, self.block_tokens, self._replaced
        ends = self.starts + self.lengths
        last = (ends - 1) // size
        entered = last * size >= self.starts
        found = []
        if not replaced and not entered.any():
            return np.empty(0, np.int64)
        for group, table in enumerate(self._of.tables):
            begun = entered
            if replaced:
                begun = entered | np.fromiter(
                    ((group, s, b) in replaced for s, b in zip(slots.tolist(), last.tolist(), strict=True)),
                    bool,
                    len(slots),
                )
            chosen = np.flatnonzero(begun & (ends % size != 0))
            if len(chosen):
                offsets = np.arange(size)[None, :]
                behind = offsets >= (ends[chosen] % size)[:, None]
                base = table[slots[chosen], last[chosen]].astype(np.int64) * size
                found.append((base[:, None] + offsets)[behind])
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def spans(self, group: int) -> Spans:
        return Spans(self.starts, self.lengths, self.first_rows, self.tables[group], self.block_tokens)


class Histories:
    """Per row the tokens before it, as views that are made when they are looked at."""

    __slots__ = ("_lengths", "_slots", "_tokens")

    def __init__(
        self, tokens: npt.NDArray[np.int32], slots: Sequence[int] | Ints, lengths: Sequence[int] | Ints
    ) -> None:
        self._tokens, self._slots, self._lengths = tokens, slots, lengths

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, row: int) -> npt.NDArray[np.int32]:
        return self._tokens[self._slots[row], : self._lengths[row]]


class Slots:
    """Token ids [slots, max_model_len + 1], lengths, and block tables [groups, slots, blocks] of every sequence."""

    def __init__(self, layout: CacheLayout, max_num_seqs: int, max_model_len: int, *, tails: bool = True) -> None:
        """`tails`: whether `Batch.tail_slots` will be asked for; an executor that never reads past a sequence's end need not."""
        self._tails = tails
        self.block_tokens = layout.block_tokens
        blocks = -(-(max_model_len + 1) // layout.block_tokens)
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.lengths = np.zeros(max_num_seqs, np.int64)
        self.prompt_lengths = np.zeros(max_num_seqs, np.int64)
        self.tables = np.full((layout.num_groups, max_num_seqs, blocks), -1, np.int32)
        self.counting: Ints = np.arange(max_num_seqs)
        self._replaced: set[tuple[int, int, int]] = set()
        self._last: tuple[list[int], Ints] = [], np.empty(0, np.int64)

    def rows_of(self, slots: list[int]) -> Ints:
        """Slots as an array, the same object as long as they are the same: what follows from them alone need not be made anew."""
        if slots != self._last[0]:
            self._last = slots, np.array(slots, np.int64)
        return self._last[1]

    def init(self, init: SlotInit) -> None:
        count = len(init.token_ids)
        self.tokens[init.slot, :count] = _array(init.token_ids)
        self.lengths[init.slot] = count
        self.prompt_lengths[init.slot] = init.prompt_length
        self.tables[:, init.slot] = -1

    def append(self, append: BlockAppend) -> None:
        last = append.first + len(append.block_ids)
        self.tables[append.group, append.slot, append.first : last] = append.block_ids
        if self._tails:
            self._replaced.update((append.group, append.slot, i) for i in range(append.first, last))

    def place(self, slot: int, tokens: Sequence[int]) -> None:
        """Append tokens to a sequence."""
        at = int(self.lengths[slot])
        self.tokens[slot, at : at + len(tokens)] = tokens
        self.lengths[slot] = at + len(tokens)

    def place_each(self, slots: Ints, tokens: Sequence[int]) -> None:
        """Append one token to each of different sequences."""
        lengths = self.lengths[slots]
        self.tokens[slots, lengths] = tokens
        self.lengths[slots] = lengths + 1

    def history(self, slot: int, length: int) -> npt.NDArray[np.int32]:
        """The first `length` tokens of a sequence, as a view."""
        return self.tokens[slot, :length]

    def histories(self, slots: Sequence[int] | Ints, lengths: Sequence[int] | Ints) -> Histories:
        """For row i the first `lengths[i]` tokens of sequence `slots[i]`."""
        return Histories(self.tokens, slots, lengths)

    def batch(self, chunks: Sequence[Chunk]) -> Batch:
        """Arrays of one step. Drafts must have been placed."""
        replaced, self._replaced = self._replaced, set()
        return Batch(self, chunks, replaced)


def sampling_rows(batch: Batch, chunks: Sequence[Chunk]) -> tuple[Ints, Ints]:
    """Token rows whose logits are sampled and the chunk each belongs to: a chunk's last row, and one more per draft."""
    if len(batch.positions) == len(chunks) and all(c.sample and not c.drafts for c in chunks):
        return batch.first_rows, batch.first_rows
    rows, owners = [], []
    for i, chunk in enumerate(chunks):
        if chunk.sample:
            last = int(batch.first_rows[i]) + chunk.length - 1
            rows.extend(range(last - len(chunk.drafts), last + 1))
            owners.extend([i] * (len(chunk.drafts) + 1))
    return np.array(rows, np.int64), np.array(owners, np.int64)


def _array(token_ids: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Much faster than numpy's own ways of taking a tuple; OverflowError for an id outside [0, 2^32)."""
    return np.frombuffer(encode(token_ids), np.uint32)


def checked_init(init: SlotInit, vocab_size: int) -> str | None:
    """Why a sequence cannot be computed, or None: a last line of defence, admission has checked already."""
    try:
        outside = _array(init.token_ids).max(initial=0) >= vocab_size
    except OverflowError:
        outside = True
    if outside:
        return f"token ids must be between 0 and {vocab_size - 1}"
    special = [*init.sampling.logit_bias, *init.sampling.stop_token_ids, *init.sampling.eos_token_ids]
    if any(not 0 <= i < vocab_size for i in special):
        return f"logit_bias and stop token ids must be between 0 and {vocab_size - 1}"
    return None
