"""An executor without a model, for tests, the planner's simulation and golden servers.

In place of KV it remembers, per block and offset, which token at which position after which text was written there.
Each chunk checks that every position it may attend to holds exactly what its own text asks for, so a stale, aliased
or overwritten block is found at once. Its tokens are a fixed function of the whole text before them: whatever the
scheduler does, the same request gets the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.control.request import Sampling
from headrace.control.step import Chunk, RowResult, SlotInit, StepPlan, StepResult, TokenLogprobs
from headrace.spec.cache import CacheLayout

_MASK = (1 << 64) - 1


def mix(state: int, value: int) -> int:
    """A 64-bit hash of a running state and one more value; the same everywhere and always."""
    x = (state ^ (value + 0x9E3779B97F4A7C15)) & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def next_token(lineage: int, index: int, sampling: Sampling, vocab_size: int) -> int:
    """The token that follows a text with hash `lineage`, as generated token number `index`."""
    token = mix(mix(lineage, sampling.seed), 0) % vocab_size
    if index < sampling.min_tokens:
        stopping = sampling.stopping_ids
        while token in stopping:
            token = (token + 1) % vocab_size
    return token


class FakeHandle:
    """A step that was done when it was submitted."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


Cell = tuple[int, int, int]
"""What one token's place in a block holds: (cache group, position, hash of the text up to and with it)."""


@dataclass(slots=True)
class _Slot:
    request_id: str
    token_ids: list[int]
    prompt_length: int
    sampling: Sampling
    tables: list[list[int]]
    lineage: list[int] = field(default_factory=list)
    """`lineage[p]`: hash of the tokens up to position p."""
    failed: bool = False
    """Its KV is garbage; steps planned before that was known still compute it, in vain."""


class FakeExecutor:
    """Runs plans at once, checks them (AssertionError names the fault), and invents tokens below `vocab_size`.

    `verify=False` skips the memory and makes tokens depend on the request's id and index alone: cheap enough for
    large simulations. `fails(request_id, position)` makes a chunk that samples after `position` fail as NaN logits
    would, with garbage for KV. `salt(request_id)` separates the texts of namespaces that must never share blocks.
    `compute_s(plan)` is what the result says the step took.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        max_num_seqs: int,
        *,
        vocab_size: int = 1000,
        verify: bool = True,
        fails: Callable[[str, int], bool] = lambda request_id, position: False,
        salt: Callable[[str], int] = lambda request_id: 0,
        compute_s: Callable[[StepPlan], float] = lambda plan: 0.0,
    ) -> None:
        self.layout = layout
        self.vocab_size = vocab_size
        self.max_num_seqs = max_num_seqs
        self.tokens_computed = 0
        self.steps = 0
        self._verify = verify
        self._fails = fails
        self._salt = salt
        self._compute_s = compute_s
        self._slots: dict[int, _Slot] = {}
        self._memory: list[list[Cell | None]] = (
            [[None] * layout.block_tokens for _ in range(num_blocks)] if verify else []
        )
        self._last_step = -1

    def submit(self, plan: StepPlan) -> FakeHandle:
        assert plan.step_id > self._last_step, "steps out of order"
        self._last_step = plan.step_id
        for slot in plan.releases:
            assert slot in self._slots, f"slot {slot} is not in use"
            del self._slots[slot]
        for init in plan.inits:
            self._fill(init)
        for append in plan.appends:
            table = self._slots[append.slot].tables[append.group]
            assert append.first <= len(table), "a gap in a block table"
            table[append.first : append.first + len(append.block_ids)] = append.block_ids
        self._copy(plan)
        slots = [chunk.slot for chunk in plan.chunks]
        assert len(set(slots)) == len(slots), "a slot has two chunks"
        for chunk in plan.chunks:
            self._place(chunk)
            self._mark_failing(chunk)
        if self._verify:
            self._attend_and_write(plan)
        rows = tuple([self._row(chunk) for chunk in plan.chunks])
        self.steps += 1
        self.tokens_computed += plan.num_tokens
        compute_s = self._compute_s(plan)
        return FakeHandle(StepResult(plan.step_id, rows, compute_s, compute_s))

    def reset(self) -> None:
        self._slots.clear()
        for cells in self._memory:
            cells[:] = [None] * len(cells)

    def close(self) -> None:
        self._slots.clear()

    def _fill(self, init: SlotInit) -> None:
        assert 0 <= init.slot < self.max_num_seqs, f"no slot {init.slot}"
        assert init.slot not in self._slots, f"slot {init.slot} is in use"
        self._slots[init.slot] = _Slot(
            init.request_id,
            list(init.token_ids),
            init.prompt_length,
            init.sampling,
            [[] for _ in self.layout.groups],
        )

    def _copy(self, plan: StepPlan) -> None:
        targets = {copy.target for copy in plan.copies}
        assert len(targets) == len(plan.copies), "two copies into one block"
        assert not targets & {copy.source for copy in plan.copies}, "a block is both source and target"
        if self._verify:
            for copy in plan.copies:
                self._memory[copy.target] = list(self._memory[copy.source])

    def _place(self, chunk: Chunk) -> None:
        """Put drafts at the end of the range and check that the rest of it is known."""
        slot = self._slots[chunk.slot]
        end = chunk.start + chunk.length
        assert chunk.length > len(chunk.drafts)
        assert len(slot.token_ids) >= end - len(chunk.drafts), "a chunk reaches beyond the known tokens"
        if chunk.sample:
            assert len(slot.token_ids) == end - len(chunk.drafts), "a chunk samples before the last known token"
        if self._verify:
            self._extend_lineage(slot, (*slot.token_ids[len(slot.lineage) :], *chunk.drafts))

    def _extend_lineage(self, slot: _Slot, tokens: tuple[int, ...]) -> None:
        state = slot.lineage[-1] if slot.lineage else self._salt(slot.request_id)
        for token in tokens:
            state = mix(state, token)
            slot.lineage.append(state)

    def _attend_and_write(self, plan: StepPlan) -> None:
        # Reads are checked before any write, since nothing may depend on another chunk of the same step, and again
        # after all writes, since no chunk may spoil what another reads.
        for chunk in plan.chunks:
            self._check_reads(chunk)
        for chunk in plan.chunks:
            self._write(chunk, garbage=False)
        for chunk in plan.chunks:
            self._check_reads(chunk)
            self._check_range(chunk, chunk.start, chunk.start + chunk.length)
        for chunk in plan.chunks:
            if self._slots[chunk.slot].failed:
                self._write(chunk, garbage=True)

    def _write(self, chunk: Chunk, *, garbage: bool) -> None:
        slot = self._slots[chunk.slot]
        size = self.layout.block_tokens
        for g, table in enumerate(slot.tables):
            for position in range(chunk.start, chunk.start + chunk.length):
                block = table[position // size]
                assert block >= 0, "a chunk writes into a hole"
                self._memory[block][position % size] = (g, position, -1 if garbage else slot.lineage[position])

    def _check_reads(self, chunk: Chunk) -> None:
        self._check_range(chunk, 0, chunk.start)

    def _check_range(self, chunk: Chunk, start: int, end: int) -> None:
        slot = self._slots[chunk.slot]
        if slot.failed:
            return
        size = self.layout.block_tokens
        for g, group in enumerate(self.layout.groups):
            first = start if group.window is None else max(start, chunk.start - group.window + 1)
            for position in range(first, end):
                block = slot.tables[g][position // size]
                assert block >= 0, f"{slot.request_id} attends position {position} of group {g}, which is a hole"
                found, want = self._memory[block][position % size], (g, position, slot.lineage[position])
                assert found == want, (
                    f"{slot.request_id} attends position {position} of group {g} in block {block}: {found}, not {want}"
                )

    def _mark_failing(self, chunk: Chunk) -> None:
        slot = self._slots[chunk.slot]
        end = chunk.start + chunk.length
        if chunk.sample and any(self._fails(slot.request_id, p) for p in range(end - 1 - len(chunk.drafts), end)):
            slot.failed = True

    def _token(self, slot: _Slot, position: int) -> int:
        """The token that follows position `position`."""
        if self._verify:
            lineage = slot.lineage[position]
        else:
            lineage = mix(hash_text(slot.request_id), position)
        return next_token(lineage, position + 1 - slot.prompt_length, slot.sampling, self.vocab_size)

    def _row(self, chunk: Chunk) -> RowResult:
        slot = self._slots[chunk.slot]
        end = chunk.start + chunk.length
        prompt: tuple[TokenLogprobs, ...] = ()
        if slot.sampling.prompt_logprobs is not None:
            scored = range(max(1, chunk.start), min(end, slot.prompt_length))
            prompt = tuple([TokenLogprobs(slot.token_ids[p], -float(p), 1) for p in scored])
        if not chunk.sample:
            return RowResult(chunk.slot, prompt_logprobs=prompt)
        if slot.failed:
            slot.token_ids.append(0)  # a step planned meanwhile goes on from here; its row will be discarded
            return RowResult(chunk.slot, error="logits are not finite")
        tokens: list[int] = []
        position = end - 1 - len(chunk.drafts)
        for draft in (*chunk.drafts, None):
            tokens.append(self._token(slot, position))
            position += 1
            if tokens[-1] != draft:
                break
        slot.token_ids += tokens
        del slot.lineage[len(slot.token_ids) - 1 :]  # rejected drafts
        logprobs: tuple[TokenLogprobs, ...] = ()
        if slot.sampling.logprobs is not None:
            logprobs = tuple([TokenLogprobs(token, -1.0, 1) for token in tokens])
        return RowResult(chunk.slot, tuple(tokens), logprobs, prompt)


def hash_text(text: str) -> int:
    """A 64-bit hash of a text, the same in every process."""
    state = 0
    for character in text:
        state = mix(state, ord(character))
    return state
