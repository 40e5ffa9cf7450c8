"""One step: plan → tensors → hidden states → logits → tokens. Knows no threads and no queues."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from headrace.control.step import Chunk, RowResult, StepPlan, StepResult, TokenLogprobs
from headrace.engine.attention._contract import AttentionBackend, LayerCache
from headrace.engine.backend import Limits
from headrace.engine.batch import Batch, Slots, checked_init, sampling_rows
from headrace.engine.grammars import Grammars
from headrace.engine.layers.context import StepContext
from headrace.engine.layers.decoder import Decoder
from headrace.engine.layers.rope import rotation_table
from headrace.engine.memory import huge_pages
from headrace.engine.sampler.sampler import NOT_FINITE, Rows, sample, token_logprobs
from headrace.engine.sampler.state import SamplingState
from headrace.spec.cache import CacheLayout

_LOGIT_ROWS = 64
"""Rows of logits held at once while prompt log-probabilities are computed."""


class KVPool:
    """The KV cache: `kv` [layers_per_group, 2 * kv_heads, blocks, block_tokens, head_dim], key heads before value heads.

    Block b of a group holds, at index s of the first dimension, the group's s-th layer (`CacheLayout.place`). Memory is
    not initialized: nothing is read that was not written, and tails of blocks are zeroed when they are begun.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (
            layout.layers_per_group,
            2 * layout.num_kv_heads,
            num_blocks,
            layout.block_tokens,
            layout.head_dim,
        )
        if device.type == "cpu":
            pages = huge_pages(math.prod(shape) * dtype.itemsize)
            self.kv = torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)
        else:
            self.kv = torch.empty(shape, dtype=dtype, device=device)
        self._tokens = self.kv.flatten(2, 3)

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        to = self.kv.device
        found = self.kv.index_select(2, torch.tensor(sources, device=to))
        self.kv.index_copy_(2, torch.tensor(targets, device=to), found)

    def zero(self, token_slots: np.ndarray) -> None:
        self._tokens.index_fill_(2, torch.from_numpy(token_slots).to(self.kv.device), 0)


class Runner:
    """Owns the pool, the slots and the sampling state of one model; `step` must be called by one thread only."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        layout: CacheLayout,
        limits: Limits,
        kv_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
        grammars: Grammars,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._device = device
        self._dtype = dtype
        self._grammars = grammars
        self.pool = KVPool(layout, limits.num_blocks, kv_dtype, device)
        self._slots = Slots(layout, limits.max_num_seqs, limits.max_model_len)
        self._sampling = SamplingState(limits.max_num_seqs)
        self._broken: dict[int, str] = {}
        places = [layout.place(i) for i in range(len(decoder.blocks))]
        self._group_of = [group for group, _ in places]
        self._caches = [LayerCache(self.pool.kv[slot]) for _, slot in places]
        self._tables = [rotation_table(rope, limits.max_model_len, device) for rope in decoder.ropes]
        # Layers that attend alike share what a step prepares.
        self._shared: dict[tuple[int, int | None], list[int]] = {}
        for i, kind in enumerate(decoder.kinds):
            self._shared.setdefault((self._group_of[i], kind.window), []).append(i)

    def step(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        self._change_slots(plan)
        if not plan.chunks:
            return StepResult(plan.step_id, (), 0.0, time.perf_counter() - begin)
        chunks = plan.chunks
        for chunk in chunks:
            if chunk.drafts:
                self._slots.place(chunk.slot, chunk.drafts)
        batch = self._slots.batch(chunks)
        if len(batch.tail_slots):
            self.pool.zero(batch.tail_slots)
        context = self._context(batch)
        started = time.perf_counter()
        hidden = self._decoder.hidden(context)
        compute_s = time.perf_counter() - started
        self._note_failures(batch, hidden)
        rows, owners = sampling_rows(batch, chunks)
        prompts, prompt_s = self._prompt_logprobs(batch, hidden)
        results: dict[int, RowResult] = {}
        if len(rows):
            started = time.perf_counter()
            logits = self._decoder.logits(self._picked(hidden, rows))
            compute_s += time.perf_counter() - started
            results = self._sample(chunks, owners, logits, prompts)
        done = tuple(
            results.get(i) or RowResult(c.slot, prompt_logprobs=prompts.get(i, ()), error=self._broken.get(c.slot))
            for i, c in enumerate(chunks)
        )
        return StepResult(plan.step_id, done, compute_s + prompt_s, time.perf_counter() - begin)

    def _change_slots(self, plan: StepPlan) -> None:
        for slot in plan.releases:
            self._grammars.release(slot)
            self._broken.pop(slot, None)
        for init in plan.inits:
            self._broken.pop(init.slot, None)
            error = checked_init(init, self._decoder.spec.vocab_size)
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
        for append in plan.appends:
            self._slots.append(append)
        if plan.copies:
            self.pool.copy([c.source for c in plan.copies], [c.target for c in plan.copies])

    def _context(self, batch: Batch) -> StepContext:
        to = self._device
        positions = torch.from_numpy(batch.positions).to(to)
        prepared: list = [None] * len(self._caches)
        for (group, _), layers in self._shared.items():
            kind = self._decoder.kinds[layers[0]]
            ready = self._attention.prepare(batch.spans(group), kind, to, self._dtype)
            for i in layers:
                prepared[i] = ready
        return StepContext(
            token_ids=batch.token_ids,
            rotations=[t.index_select(0, positions).unsqueeze(1) for t in self._tables],
            caches=self._caches,
            group_of=self._group_of,
            write_slots=[torch.from_numpy(s).to(to) for s in batch.write_slots],
            prepared=prepared,
            attention=self._attention,
        )

    def _note_failures(self, batch: Batch, hidden: torch.Tensor) -> None:
        """Mark sequences with a row that is not finite, also where nothing is sampled: their KV would be published."""
        finite = torch.isfinite(hidden.sum(-1)).cpu().numpy()
        if not finite.all():
            whole = np.logical_and.reduceat(finite, batch.first_rows)
            for slot in batch.slots[~whole].tolist():
                self._broken.setdefault(slot, NOT_FINITE)

    def _picked(self, hidden: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        if len(rows) == len(hidden):
            return hidden
        return hidden.index_select(0, torch.from_numpy(rows).to(self._device))

    def _sample(
        self,
        chunks: Sequence[Chunk],
        owners: np.ndarray,
        logits: torch.Tensor,
        prompts: dict[int, tuple[TokenLogprobs, ...]],
    ) -> dict[int, RowResult]:
        """Sample every row and append what was accepted to the slots."""
        slots = self._slots
        of_chunk = [chunks[i] for i in owners.tolist()]
        # Row j of a chunk with d drafts continues the sequence after j of them.
        first_of = {int(i): at for at, i in reversed(list(enumerate(owners.tolist())))}
        lengths = [
            c.start + c.length - len(c.drafts) + at - first_of[i]
            for at, (i, c) in enumerate(zip(owners.tolist(), of_chunk, strict=True))
        ]
        row_slots = np.fromiter((c.slot for c in of_chunk), np.int64, len(of_chunk))
        history = [slots.history(c.slot, n) for c, n in zip(of_chunk, lengths, strict=True)]
        masks, failed = self._grammars.masks({chunks[i].slot: at for i, at in first_of.items()})
        self._broken.update(failed)
        rows = Rows(row_slots, history, slots.prompt_lengths[row_slots], masks)
        sampled = sample(logits, rows, self._sampling)
        results = {}
        for i, at in first_of.items():
            results[i] = self._row(chunks[i], at, sampled, prompts.get(i, ()))
        return results

    def _row(self, chunk: Chunk, at: int, sampled, prompt: tuple[TokenLogprobs, ...]) -> RowResult:
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
            self._broken[slot] = error
            # The slot still advances, so that a step issued meanwhile has an input; its result is an error again.
            self._slots.place(slot, [0])
            return RowResult(slot, prompt_logprobs=prompt, error=error)
        self._slots.place(slot, kept)
        return RowResult(slot, tuple(kept), tuple(logprobs), prompt)

    def _prompt_logprobs(
        self, batch: Batch, hidden: torch.Tensor
    ) -> tuple[dict[int, tuple[TokenLogprobs, ...]], float]:
        """For chunks that asked: log-probabilities of prompt tokens start + 1 … as far as the chunk's rows predict them."""
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        begin = time.perf_counter()
        for i, slot in enumerate(batch.slots.tolist()):
            wanted = self._sampling.rules[slot].prompt_logprobs
            start, first = int(batch.starts[i]), int(batch.first_rows[i])
            count = min(start + int(batch.lengths[i]), int(self._slots.prompt_lengths[slot]) - 1) - start
            if wanted is None or count <= 0:
                continue
            targets = torch.from_numpy(self._slots.tokens[slot, start + 1 : start + 1 + count].astype(np.int64))
            entries: list[TokenLogprobs] = []
            for at in range(0, count, _LOGIT_ROWS):
                n = min(_LOGIT_ROWS, count - at)
                logits = self._decoder.logits(hidden[first + at : first + at + n])
                if not bool(torch.isfinite(logits.sum())):
                    self._broken[slot] = NOT_FINITE
                    break
                entries.extend(token_logprobs(logits, targets[at : at + n].to(logits.device), [wanted] * n))
            found[i] = tuple(entries)
        return found, (time.perf_counter() - begin) if found else 0.0
