"""One step: plan → arrays → hidden states → logits → tokens. Knows no threads, no queues and no arithmetic of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.control.step import Chunk, RowResult, StepPlan, StepResult, TokenLogprobs
from headrace.engine.backend import Limits, LogitsWatch
from headrace.engine.batch import Batch, Slots, checked_init, sampling_rows
from headrace.engine.compute import Compute
from headrace.engine.grammars import Grammars
from headrace.engine.sampler.rows import NOT_FINITE, Rows
from headrace.engine.sampler.state import SamplingState
from headrace.spec.cache import CacheLayout

_LOGIT_ROWS = 64
"""Rows of logits held at once while prompt log-probabilities are computed."""


class Steps:
    """Owns the slots and the sampling state of one model; `step` must be called by one thread only."""

    def __init__(
        self,
        compute: Compute,
        layout: CacheLayout,
        limits: Limits,
        grammars: Grammars,
        watch: LogitsWatch | None = None,
    ) -> None:
        self._compute = compute
        self._grammars = grammars
        self._slots = Slots(layout, limits.max_num_seqs, limits.max_model_len)
        self._sampling = SamplingState(limits.max_num_seqs)
        self._broken: dict[int, str] = {}
        self._asking: set[int] = set()
        """Slots whose sequences want log-probabilities of their prompts."""
        self._watch = watch

    def step(self, plan: StepPlan, begun: Callable[[], None]) -> StepResult:
        """Run one step; `begun` is called when its arithmetic begins, if it has any."""
        begin = time.perf_counter()
        self._change_slots(plan)
        if not plan.chunks:
            return StepResult(plan.step_id, (), 0.0, time.perf_counter() - begin)
        chunks = plan.chunks
        for chunk in chunks:
            if chunk.drafts:
                self._slots.place(chunk.slot, chunk.drafts)
        batch = self._slots.batch(chunks)
        rows, owners = sampling_rows(batch, chunks)
        asked = self._prompt_ranges(batch)
        wanted = rows
        if asked:
            wanted = np.concatenate([rows, *(first + np.arange(count) for first, count in asked.values())])
        started = time.perf_counter()
        for i in self._compute.hidden(batch, wanted, begun).tolist():
            self._fail(chunks[i].slot, NOT_FINITE)
        logits = self._compute.logits(0, len(rows)) if len(rows) else None
        compute_s = time.perf_counter() - started
        results: dict[int, tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]] = {}
        if owners is batch.first_rows and not (self._grammars or self._broken):
            sampled = self._compute.sample(logits, self._decoding(batch), self._sampling)
            if not (asked or sampled.errors or sampled.logprobs):
                # Mostly each sequence has one more token and there is nothing else to tell.
                self._slots.place_each(batch.slots, sampled.token_ids)
                done = tuple([RowResult(c.slot, (t,)) for c, t in zip(chunks, sampled.token_ids, strict=True)])
                return StepResult(plan.step_id, done, compute_s, time.perf_counter() - begin)
            results = {i: self._accept(chunk, i, sampled) for i, chunk in enumerate(chunks)}
        elif len(rows):
            results = self._sample(chunks, owners, logits)
        started = time.perf_counter()
        prompts = self._prompt_logprobs(batch, asked, len(rows))
        if asked:
            compute_s += time.perf_counter() - started
        done = tuple(
            self._result(chunk, results.get(i, ((), ())), prompts.get(i, ())) for i, chunk in enumerate(chunks)
        )
        return StepResult(plan.step_id, done, compute_s, time.perf_counter() - begin)

    def _change_slots(self, plan: StepPlan) -> None:
        for slot in plan.releases:
            self._grammars.release(slot)
            self._broken.pop(slot, None)
            self._asking.discard(slot)
        for init in plan.inits:
            self._broken.pop(init.slot, None)
            self._asking.discard(init.slot)
            error = checked_init(init, self._compute.vocab_size)
            if error is None:
                error = self._grammars.admit(init)
            if error is not None:
                # Computed like any other, on harmless input; only its result says what was wrong.
                self._broken[init.slot] = error
                sampling = type(init.sampling)(max_tokens=1, temperature=0.0)
                tokens = (0,) * len(init.token_ids)
                init = type(init)(init.slot, init.request_id, tokens, init.prompt_length, sampling)
            self._slots.init(init)
            self._sampling.admit(init.slot, init.sampling)
            if init.sampling.prompt_logprobs is not None:
                self._asking.add(init.slot)
        for append in plan.appends:
            self._slots.append(append)
        if plan.copies:
            self._compute.copy([c.source for c in plan.copies], [c.target for c in plan.copies])

    def _decoding(self, batch: Batch) -> Rows:
        """The rows to sample when each chunk is one token that the next one follows."""
        lengths = batch.starts + 1
        histories = self._slots.histories(batch.slots, lengths)
        return Rows(batch.slots, histories, self._slots.prompt_lengths[batch.slots], {}, lengths)

    def _sample(
        self, chunks: Sequence[Chunk], owners: npt.NDArray[np.int64], logits: Any
    ) -> dict[int, tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]]:
        """Sample every row and append what was accepted to the slots; tokens and log-probabilities by chunk."""
        slots = self._slots
        first_of: dict[int, int] = {}
        of_row, lengths = [], []
        for at, i in enumerate(owners.tolist()):
            chunk = chunks[i]
            # Row j of a chunk with d drafts continues the sequence after j of them.
            row = at - first_of.setdefault(i, at)
            of_row.append(chunk.slot)
            lengths.append(chunk.start + chunk.length - len(chunk.drafts) + row)
        masks, failed = self._grammars.masks({chunks[i].slot: at for i, at in first_of.items()})
        self._broken.update(failed)
        row_slots = slots.rows_of(of_row)
        histories = slots.histories(of_row, lengths)
        rows = Rows(row_slots, histories, slots.prompt_lengths[row_slots], masks, np.array(lengths, np.int64))
        sampled = self._compute.sample(logits, rows, self._sampling)
        if not (self._broken or self._grammars or sampled.errors or sampled.logprobs) and not any(
            chunks[i].drafts for i in first_of
        ):
            slots.place_each(row_slots, sampled.token_ids)
            return {i: ((sampled.token_ids[at],), ()) for i, at in first_of.items()}
        return {i: self._accept(chunks[i], at, sampled) for i, at in first_of.items()}

    def _accept(self, chunk: Chunk, at: int, sampled) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        slot, drafts = chunk.slot, chunk.drafts
        if self._grammars.follows(slot):
            drafts = ()  # a mask for row j would need the matcher after j drafts
        kept: list[int] = []
        logprobs: list[TokenLogprobs] = []
        error = self._broken.get(slot)
        for j in range(len(drafts) + 1):
            error = error or sampled.errors.get(at + j)
            if error is not None:
                break
            token = sampled.token_ids[at + j]
            error = self._grammars.advance(slot, token)
            kept.append(token)
            if at + j in sampled.logprobs:
                logprobs.append(sampled.logprobs[at + j])
            if j < len(drafts) and token != drafts[j]:
                break
        if chunk.drafts:
            self._slots.lengths[slot] -= len(chunk.drafts)
        if error is not None:
            self._fail(slot, error)
            # The slot still advances, so that a step issued meanwhile has an input; its result is an error again.
            self._slots.place(slot, [0])
            return (), ()
        self._slots.place(slot, kept)
        return tuple(kept), tuple(logprobs)

    def _fail(self, slot: int, error: str) -> None:
        self._broken.setdefault(slot, error)
        if error == NOT_FINITE:
            blocks = self._slots.tables[:, slot]
            self._compute.discard(sorted(set(blocks[blocks >= 0].tolist())))

    def _result(
        self,
        chunk: Chunk,
        sampled: tuple[tuple[int, ...], tuple[TokenLogprobs, ...]],
        prompt: tuple[TokenLogprobs, ...],
    ) -> RowResult:
        error = self._broken.get(chunk.slot)
        tokens, logprobs = ((), ()) if error is not None else sampled
        return RowResult(chunk.slot, tokens, logprobs, prompt, error)

    def _prompt_ranges(self, batch: Batch) -> dict[int, tuple[int, int]]:
        """Token rows (first, count) of the chunks that asked for log-probabilities of the prompt tokens they predict."""
        found = {}
        if not self._asking:
            return found
        for i, slot in enumerate(batch.slots.tolist()):
            if slot in self._asking:
                start, end = int(batch.starts[i]), int(batch.starts[i] + batch.lengths[i])
                count = min(end, int(self._slots.prompt_lengths[slot]) - 1) - start
                if count > 0:
                    found[i] = int(batch.first_rows[i]), count
        return found

    def _prompt_logprobs(
        self, batch: Batch, asked: dict[int, tuple[int, int]], first: int
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Entries by chunk; their hidden states were kept from `first` on, one chunk after the other."""
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        for i, (_, count) in asked.items():
            slot, start = int(batch.slots[i]), int(batch.starts[i])
            targets = self._slots.tokens[slot, start + 1 : start + 1 + count].astype(np.int64)
            wanted = self._sampling.rules[slot].prompt_logprobs or 0
            entries: list[TokenLogprobs] = []
            for at in range(0, count, _LOGIT_ROWS):
                n = min(_LOGIT_ROWS, count - at)
                logits = self._compute.logits(first + at, n)
                some = self._compute.token_logprobs(logits, targets[at : at + n], [wanted] * n)
                if some is None:
                    self._fail(slot, NOT_FINITE)
                    break
                entries.extend(some)
                if self._watch is not None:
                    self._watch(slot, start + at, logits)
            found[i] = tuple(entries)
            first += count
        return found
