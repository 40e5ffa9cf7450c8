"""The scheduler: requests in, step plans out, results in, outputs out. No torch, no threads, no clock of its own.

A step is planned from what is known and need not wait for the steps in flight: the tokens they sample are placeholders
that the executor fills in. Steps run strictly in the order planned. That is why blocks can be reused at once when a
request ends although a step in flight may still touch them: whoever gets them next first writes them in a later step,
and reads only what it wrote, or what was published, which nobody writes again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from operator import attrgetter

from headrace.base.clock import Clock
from headrace.base.errors import InvalidInput
from headrace.control.api import EngineStats, Finish, FinishReason, Output
from headrace.control.blocks import BlockPool
from headrace.control.config import SchedulerConfig
from headrace.control.demand import Demand
from headrace.control.drafts import Drafter, NoDraft
from headrace.control.policies import ADMISSION, EVICTION, ORDER
from headrace.control.policies.admission import Admission
from headrace.control.policies.order import Order
from headrace.control.prefill import StepPace
from headrace.control.prefix import Hit, NoPrefix, PrefixCache, PrefixTree
from headrace.control.request import Request
from headrace.control.sequence import Sequence, State
from headrace.control.sharing import hold_for, is_held
from headrace.control.step import (
    BlockAppend,
    BlockCopy,
    Chunk,
    RowResult,
    SlotInit,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from headrace.control.tables import BlockTables
from headrace.control.timeline import Part, ticks
from headrace.spec.cache import CacheLayout

_BY_RANK = attrgetter("rank")


class _Build:
    """A step under construction."""

    __slots__ = (
        "appends",
        "budget",
        "chunks",
        "copies",
        "inits",
        "now",
        "prefill_budget",
        "promised",
        "rows",
        "sources",
        "step_id",
    )

    def __init__(self, step_id: int, budget: int, now: int) -> None:
        self.step_id = step_id
        self.now = now
        self.budget = budget
        self.prefill_budget = budget
        self.promised: int | None = None
        """Blocks that the running sequences still need for their known tokens, once admission has counted them."""
        self.inits: list[SlotInit] = []
        self.appends: list[BlockAppend] = []
        self.copies: list[BlockCopy] = []
        self.chunks: list[Chunk] = []
        self.rows: list[tuple[Sequence, int]] = []
        """Per chunk: the sequence and its incarnation."""
        self.sources: list[int] = []
        """Blocks to be copied, held until the plan is complete: no other copy or chunk of this step may write them."""


class Scheduler:
    """One engine's scheduler over `num_blocks` blocks of `layout`. Not thread-safe; every method returns at once.

    Use: `submit` and `abort` at any time; `plan`, give the plan to the executor, then `commit` its result, in order.
    Up to any number of plans may be in flight; each accepted request gets exactly one `Output` with `finish`, returned
    by `submit` (refused), `abort`, `commit` or `fail_all`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        layout: CacheLayout,
        num_blocks: int,
        clock: Clock,
        drafter: Drafter | None = None,
    ) -> None:
        self.config = config
        self._clock = clock
        self._drafter: Drafter = NoDraft() if drafter is None else drafter
        self._depth = self._drafter.depth
        self._pace = None if config.step_target_s is None else StepPace(config.step_target_s)
        self._demand = Demand(layout)
        self._block_tokens = layout.block_tokens
        self._pool = BlockPool(num_blocks)
        self._order: Order = ORDER.get(config.order)()
        self._admission: Admission = ADMISSION.get(config.admission)()
        eviction = EVICTION.get(config.eviction)()
        self._prefix: PrefixCache = (
            PrefixTree(self._pool, self._demand, eviction, whole_blocks=layout.whole_blocks)
            if config.prefix_caching
            else NoPrefix(layout.num_groups)
        )
        self._tables = BlockTables(self._pool, self._prefix, self._demand, config.max_batched_tokens)
        self._watermark_blocks = int(config.watermark * num_blocks)
        self._capacity_tokens = self._demand.capacity_tokens(num_blocks, config.max_model_len)

        self._live: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # by rank
        self._running: list[Sequence] = []  # by rank
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._released_slots: list[int] = []  # free too, but the next plan must tell the executor
        self._in_flight: deque[tuple[StepPlan, list[tuple[Sequence, int]]]] = deque()
        self._unpublished: list[tuple[Sequence, int]] = []
        """Whose prompts grew since the last `settle`, in which incarnation."""
        self._ended: list[Sequence] = []
        """Ended since the last `settle`, which publishes what they computed and gives back their blocks."""
        self._next_number = 0
        self._next_step = 0
        # The first in line that did not fit, with what was free and published then: no use trying before that changes.
        self._blocked: tuple[Sequence, int, int] | None = None

        self._prefix_queries_tokens = 0
        self._prefix_hit_tokens = 0
        self._prompt_tokens = 0
        self._prefill_tokens = 0
        self._generation_tokens = 0
        self._preemptions = 0
        self._steps = 0
        self._step_s = 0.0
        self._compute_s = 0.0

    # Requests

    @property
    def capacity_tokens(self) -> int:
        """Most positions that one sequence alone can hold in this pool (at most `max_model_len`)."""
        return self._capacity_tokens

    def submit(self, request: Request) -> Output | None:
        """Accept a request (None), or refuse it for good with a terminal `Output` that says why.

        A sequence ends with reason `length` at `max_tokens`, at `max_model_len`, or when it fills the whole pool.
        Raises `InvalidInput` for the id of a live request, since an `Output` would end that one.
        """
        if request.request_id in self._live:
            raise InvalidInput(f"request id {request.request_id!r} is already in use", field="request_id")
        now = ticks(self._clock.now())
        start = now if request.arrival_s == 0.0 else min(now, ticks(request.arrival_s))
        prompt = len(request.prompt_token_ids)
        limit = min(prompt + request.sampling.max_tokens, self.config.max_model_len, self._capacity_tokens + 1)
        error = self._refusal(prompt, request.sampling.max_tokens)
        sequence: Sequence | None = None
        if error is None:
            try:
                sequence = Sequence(request, self._next_number, limit, self._demand.num_groups, start)
            except (OverflowError, TypeError):
                error = "prompt_token_ids: every id must be an integer from 0 to 2^32 - 1"
        if sequence is None:
            return Output(request.request_id, finish=Finish(FinishReason.ERROR, prompt, 0, 0, error=error))
        self._next_number += 1
        sequence.rank = self._order.rank(sequence)
        self._live[request.request_id] = sequence
        insort(self._waiting, sequence, key=_BY_RANK)
        return None

    def _refusal(self, prompt: int, max_tokens: int) -> str | None:
        if prompt < 1:
            return "prompt_token_ids: the prompt is empty"
        if max_tokens < 0:
            return f"max_tokens: must not be negative, got {max_tokens}"
        if prompt + min(1, max_tokens) > self.config.max_model_len:
            return (
                f"prompt_token_ids: {prompt} prompt tokens and one to generate exceed max_model_len "
                f"{self.config.max_model_len}"
            )
        if prompt > self._capacity_tokens:
            return (
                f"prompt_token_ids: {prompt} prompt tokens need {self._demand.peak(prompt, 1)} KV blocks of "
                f"{self._block_tokens} tokens, but the pool has {self._pool.num_blocks} "
                f"(room for {self._capacity_tokens} tokens of one sequence)"
            )
        return None

    def abort(self, request_id: str) -> Output | None:
        """End a request now; its blocks are free on return. None if it is unknown or has already ended."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        output = Output(request_id, finish=self._end(sequence, FinishReason.ABORT, ticks(self._clock.now())))
        self.settle()
        return output

    def fail_all(self, error: str) -> list[Output]:
        """End every request with `error` after the executor died. Steps in flight are forgotten, and so is all cached
        KV. The executor must be replaced by a fresh one, with empty slots, before the next plan."""
        now = ticks(self._clock.now())
        self._in_flight.clear()
        self.settle()
        self._prefix.flush()
        outputs = [
            Output(s.request.request_id, finish=self._end(s, FinishReason.ERROR, now, error=error, publish=False))
            for s in list(self._live.values())
        ]
        self._released_slots.clear()
        return outputs

    def withdraw(self) -> None:
        """Take back every step in flight, after one of them failed as a whole. Running requests wait again and will be
        computed anew; all cached KV is forgotten. The executor must be `reset` before the next plan."""
        for _, rows in self._in_flight:
            for sequence, _ in rows:
                sequence.pending = 0
        self._in_flight.clear()
        self.settle()
        self._prefix.flush()
        now = ticks(self._clock.now())
        for sequence in list(self._running):
            self._preempt(sequence, now, publish=False)
        self._released_slots.clear()

    def flush_prefix(self) -> None:
        """Forget every cached prefix. Live requests keep their blocks and publish again as they go on."""
        self.settle()
        self._prefix.flush()

    def has_work(self) -> bool:
        """Whether any request is live or any step is in flight."""
        return bool(self._live or self._in_flight)

    def stats(self) -> EngineStats:
        """Blocks of requests that have ended count as free, but as cached only after `settle`."""
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            free_blocks=self._pool.free_blocks + self._tables.held_by_these_alone(self._ended),
            total_blocks=self._pool.num_blocks,
            cached_blocks=self._pool.cached_blocks,
            prefix_queries_tokens=self._prefix_queries_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            prompt_tokens=self._prompt_tokens,
            prefill_tokens_computed=self._prefill_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=self._preemptions,
            steps=self._steps,
            step_s=self._step_s,
            compute_s=self._compute_s,
        )

    # Planning

    def plan(self, alone: str | None = None) -> StepPlan | None:
        """The next step, to be executed after all earlier ones; None if there is nothing to compute before a commit.

        Decodes come first, then running prefills, then new requests, within `max_batched_tokens`. With `alone`, a live
        request's id, every other one waits; no step may be in flight when that changes.
        """
        self.settle()
        if not self._live:
            return None
        if alone is not None:
            return self._plan_alone(self._live[alone])
        for _ in range(2):
            build = _Build(self._next_step, self.config.max_batched_tokens, ticks(self._clock.now()))
            preemptions = self._preemptions
            starved = self._plan_running(build)
            if self._waiting and self._slots and not starved and self._preemptions == preemptions:
                self._plan_waiting(build)
            if build.chunks:
                return self._issue(build)
            if self._in_flight or not self._live:
                return None
            # Nothing planned and nothing in flight: a preemption may have made room, which the next round uses.
        raise AssertionError(f"the scheduler is stuck: {self.stats()}")

    @property
    def unsettled(self) -> bool:
        """Whether `settle` has something to do."""
        return bool(self._unpublished or self._ended)

    def settle(self) -> None:
        """Offer what prefill steps and ended requests have computed to the prefix cache, and give back the blocks of the latter.

        Not done by `commit`, since no token need wait for it: of a long prompt it takes milliseconds. `plan` begins with it;
        call it when there is nothing to plan for a while."""
        for sequence in self._ended:
            self._tables.publish(sequence)
            self._tables.vacate(sequence)
        self._ended.clear()
        for sequence, incarnation in self._unpublished:
            if sequence.state is State.RUNNING and sequence.incarnation == incarnation:
                self._tables.publish(sequence)
                self._tables.drop_behind_windows(sequence)
        self._unpublished.clear()

    def _plan_alone(self, sequence: Sequence) -> StepPlan | None:
        now = ticks(self._clock.now())
        for other in list(self._running):
            if other is not sequence:
                self._preempt(other, now)
        build = _Build(self._next_step, self.config.max_batched_tokens, now)
        if sequence.state is State.RUNNING:
            self._plan_running(build)
        elif not self._in_flight:
            sequence.held_for = None
            admitted = self._admit(sequence, self._match(sequence, len(sequence.token_ids) - 1), build)
            assert admitted, "the pool holds any one request"
            _discard(self._waiting, sequence)
        return self._issue(build) if build.chunks else None

    def _issue(self, build: _Build) -> StepPlan:
        self._pool.release(build.sources)
        plan = StepPlan(
            build.step_id,
            tuple(self._released_slots),
            tuple(build.inits),
            tuple(build.appends),
            tuple(build.copies),
            tuple(build.chunks),
        )
        self._released_slots.clear()
        self._in_flight.append((plan, build.rows))
        self._next_step += 1
        return plan

    def _plan_running(self, build: _Build) -> bool:
        """Plan every running sequence; True if one of them lacks blocks, so that no one else may be let in."""
        prefilling: list[Sequence] = []
        starved = False
        depth, step = self._depth, build.step_id
        chunks, rows = build.chunks, build.rows
        spare = build.budget - len(self._running)  # one token each is spoken for
        for sequence in tuple(self._running):
            if sequence.state is not State.RUNNING:
                continue  # preempted by one before it
            pending = sequence.pending
            known = len(sequence.token_ids) + pending
            if pending and (known >= sequence.limit or depth):
                continue  # its last token is on its way, or its drafts are
            start = sequence.scheduled
            todo = known - start
            if todo != 1:
                if todo:
                    prefilling.append(sequence)
                continue
            drafts: tuple[int, ...] = ()
            if depth and start >= sequence.prompt_length:
                drafts = self._propose(sequence, min(depth, sequence.limit - known - 1, spare))
                spare -= len(drafts)
            end = start + 1 + len(drafts)
            if end > sequence.room and not self._grow(sequence, end, build):
                starved = True
                continue
            if sequence.dirty:
                self._tables.announce(sequence, build.appends)
            sample = known < sequence.limit
            chunks.append(Chunk(sequence.slot, start, end - start, sample, drafts))
            rows.append((sequence, sequence.incarnation))
            sequence.scheduled = end
            sequence.planned = step
            if sample:
                sequence.pending = pending + 1
            build.budget -= end - start
        if chunks:
            build.prefill_budget = self._prefill_budget(build, len(prefilling) + len(self._waiting))
        for sequence in prefilling:
            if sequence.state is State.RUNNING and not self._plan_prefill(sequence, build):
                starved = True
        return starved

    def _prefill_budget(self, build: _Build, new: int) -> int:
        """Prompt tokens of a step that holds up the streams planned so far, with `new` requests that have no token yet."""
        config, streams = self.config, len(build.chunks)
        budget = build.budget
        if config.max_prefill_tokens is not None and (
            config.prefill_burst is None or new <= config.prefill_burst * streams
        ):
            budget = config.max_prefill_tokens
        if new and self._pace is not None and (paced := self._pace.prompt_tokens(streams)) is not None:
            budget = min(budget, paced)
        return budget

    def _propose(self, sequence: Sequence, at_most: int) -> tuple[int, ...]:
        # Drafts are a luxury: never preempt anyone for them.
        at_most = min(at_most, self._tables.reach(sequence.room) - sequence.scheduled - 1)
        if at_most < 1:
            return ()
        return self._drafter.propose(sequence.request.request_id, sequence.token_ids, at_most)[:at_most]

    def _plan_prefill(self, sequence: Sequence, build: _Build) -> bool:
        """Plan the next chunk of a running prefill; False if it lacks blocks."""
        start = sequence.scheduled
        known = len(sequence.token_ids) + sequence.pending
        wanted = min(known - start, build.budget, build.prefill_budget)
        if wanted < 1:
            return True
        while (length := min(wanted, self._tables.reach(sequence.room) - start)) < 1:
            victim = self._victim(build.step_id)
            if victim is sequence or victim is None:
                return False
            self._preempt(victim, build.now)
        self._tables.grow(sequence, start + length, build.appends)
        self._add_chunk(sequence, length, build)
        return length == wanted

    def _add_chunk(self, sequence: Sequence, length: int, build: _Build) -> None:
        if sequence.dirty:
            self._tables.announce(sequence, build.appends)
        start = sequence.scheduled
        known = len(sequence.token_ids) + sequence.pending
        sample = start + length == known and known < sequence.limit
        build.chunks.append(Chunk(sequence.slot, start, length, sample))
        build.rows.append((sequence, sequence.incarnation))
        sequence.scheduled = start + length
        sequence.planned = build.step_id
        if sample:
            sequence.pending += 1
        build.budget -= length
        build.prefill_budget -= length

    def _grow(self, sequence: Sequence, end: int, build: _Build) -> bool:
        """Give a sequence blocks up to position `end`, preempting others if need be; False if it has to wait."""
        while self._tables.lack(sequence, end):
            victim = self._victim(build.step_id)
            assert victim is not None  # at least the sequence itself is not planned yet
            if victim is sequence and self._in_flight:
                return False  # their commits may free blocks, those behind its own windows among them
            self._preempt(victim, build.now)
            if victim is sequence:
                return False
        self._tables.grow(sequence, end, build.appends)
        return True

    def _victim(self, step: int) -> Sequence | None:
        """The last-ranked running sequence without a chunk in the step being planned."""
        return next((s for s in reversed(self._running) if s.planned != step), None)

    def _preempt(self, sequence: Sequence, now: int, *, publish: bool = True) -> None:
        """Take back all blocks of a running sequence; it starts again later, from what the prefix cache then has.

        Tokens that steps in flight are sampling for it stay valid (they run before anything planned from now on).
        """
        if publish:
            self._tables.publish(sequence)
        self._tables.vacate(sequence)
        self._leave(sequence)
        sequence.state = State.WAITING
        sequence.incarnation += 1
        sequence.preemptions += 1
        sequence.scheduled = sequence.computed = 0
        sequence.prompt_logprobs.clear()
        sequence.watch.enter(Part.PREEMPTED, now)
        self._preemptions += 1
        insort(self._waiting, sequence, key=_BY_RANK)

    # Admission

    def _plan_waiting(self, build: _Build) -> None:
        """Admit waiting requests, best first, until one does not fit."""
        producers = [s for s in self._running if s.computed < len(s.token_ids) - 1]
        admitted: list[Sequence] = []
        for sequence in self._order.candidates(self._waiting, self._hit_tokens):
            if not self._slots or min(build.budget, build.prefill_budget) < 1:
                break
            if sequence.pending:
                break  # preempted a moment ago: its last tokens are still in flight
            if is_held(sequence):
                continue
            if self._still_blocked(sequence):
                break
            hit = self._match(sequence, len(sequence.token_ids) - 1)
            if self._prefix.enabled and not self._skips_cache(sequence):
                config = self.config
                if hold_for(sequence, hit.length, producers, self._block_tokens, config.share_min):
                    continue
            if not self._admit(sequence, hit, build):
                self._blocked = (sequence, self._pool.free_blocks, self._prefix.publications)
                break
            admitted.append(sequence)
            producers.append(sequence)
            self._order.admitted(sequence, self._waiting)
        for sequence in admitted:
            _discard(self._waiting, sequence)

    def _still_blocked(self, sequence: Sequence) -> bool:
        if self._blocked is None or not self._running:
            return False
        who, free, publications = self._blocked
        return who is sequence and free >= self._pool.free_blocks and publications == self._prefix.publications

    def _skips_cache(self, sequence: Sequence) -> bool:
        """Prompt logprobs need every prompt position computed, until they have been delivered."""
        return sequence.wants_prompt_logprobs

    def _match(self, sequence: Sequence, limit: int) -> Hit:
        # The last known token is always computed, since its logits give the next one.
        limit = 0 if self._skips_cache(sequence) else limit
        return self._prefix.match(sequence.request.namespace, sequence.encoded, limit)

    def _hit_tokens(self, sequence: Sequence) -> int:
        """What the cache has of a waiting request. An eviction since the last look may have made it less; the match that
        counts is made at admission."""
        publications, hit = sequence.probed
        if publications != self._prefix.publications:
            hit = self._match(sequence, len(sequence.token_ids) - 1).length
            sequence.probed = (self._prefix.publications, hit)
        return hit

    def _admit(self, sequence: Sequence, hit: Hit, build: _Build) -> bool:
        """Start a waiting request if its first chunk and the admission policy allow; nothing is changed otherwise."""
        tables, known = self._tables, len(sequence.token_ids)
        wanted = min(known - hit.length, build.budget, build.prefill_budget)
        length = tables.room_after(hit, wanted)
        if length < 1 and hit.tail is not None:
            # The block to be copied from may be what is missing: do without the part of a block.
            hit = self._match(sequence, len(hit.path) * self._block_tokens)
            wanted = min(known - hit.length, build.budget, build.prefill_budget)
            length = tables.room_after(hit, wanted)
        if length < 1 or (self._running and not self._admissible(known, hit, wanted, build)):
            return False
        if length < known - hit.length and not self.config.chunked_prefill:
            return False

        request = sequence.request
        sequence.slot = slot = self._slots.pop()
        sequence.scheduled = sequence.computed = hit.length
        sequence.incarnation += 1
        build.inits.append(
            SlotInit(slot, request.request_id, tuple(sequence.token_ids), sequence.prompt_length, request.sampling)
        )
        build.sources += tables.start(sequence, hit, build.copies)
        build.appends += [BlockAppend(slot, g, 0, tuple(t)) for g, t in enumerate(sequence.tables) if t]
        tables.grow(sequence, hit.length + length, build.appends)
        sequence.state = State.RUNNING
        insort(self._running, sequence, key=_BY_RANK)
        sequence.watch.enter(Part.DECODE if sequence.generated else Part.PREFILL, build.now)
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = hit.length
            self._prompt_tokens += sequence.prompt_length
            if self._prefix.enabled:
                self._prefix_queries_tokens += sequence.prompt_length
                self._prefix_hit_tokens += hit.length
        self._add_chunk(sequence, length, build)
        if build.promised is not None:
            build.promised += tables.promised(sequence)
        return True

    def _admissible(self, known: int, hit: Hit, first: int, build: _Build) -> bool:
        if build.promised is None:
            build.promised = sum(self._tables.promised(s) for s in self._running)
        return self._admission.admits(
            whole_blocks=self._tables.whole_need(known, hit),
            first_blocks=self._tables.first_need(hit, first),
            promised_blocks=build.promised,
            free_blocks=self._tables.free_beside(hit),
            watermark_blocks=self._watermark_blocks,
        )

    # Results

    def commit(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Take in the result of the oldest step in flight; returns the new tokens and the ends of its requests.

        What was computed is published to the prefix cache, and blocks of ended requests are given back, by `settle`, after the
        tokens could be told.
        Rows of requests that ended meanwhile are discarded. Raises `ValueError` if it is not that step's result.
        """
        if not self._in_flight or self._in_flight[0][0].step_id != plan.step_id or result.step_id != plan.step_id:
            raise ValueError(f"step {plan.step_id} with result {result.step_id} is not the oldest step in flight")
        if len(result.rows) != len(plan.chunks):
            raise ValueError(f"step {plan.step_id}: {len(result.rows)} rows for {len(plan.chunks)} chunks")
        _, rows = self._in_flight.popleft()
        now = ticks(self._clock.now())
        outputs: list[Output] = []
        for chunk, row, (sequence, incarnation) in zip(plan.chunks, result.rows, rows, strict=True):
            if sequence.state is State.FINISHED:
                continue
            if chunk.sample:
                sequence.pending -= 1
            output = self._commit_row(sequence, chunk, row, incarnation == sequence.incarnation, now)
            if output is not None:
                outputs.append(output)
        if self._pace is not None and any(chunk.length > 1 + len(chunk.drafts) for chunk in plan.chunks):
            self._pace.observe(plan.num_tokens, result.compute_s)
        self._steps += 1
        self._step_s += result.total_s
        self._compute_s += result.compute_s
        return outputs

    def _commit_row(self, sequence: Sequence, chunk: Chunk, row: RowResult, current: bool, now: int) -> Output | None:
        tokens = row.token_ids
        error = row.error
        if error is None and (not tokens if chunk.sample else tokens):
            error = f"the executor returned {len(tokens)} tokens for a chunk with sample={chunk.sample}"
        if error is not None:
            return Output(sequence.request.request_id, finish=self._fail(sequence, error, now))
        decoding = chunk.start >= sequence.prompt_length and chunk.length == 1 + len(chunk.drafts)
        if decoding:
            sequence.decode_steps += 1
        else:
            sequence.prefill_steps += 1
            self._prefill_tokens += chunk.length
        if current:
            end = chunk.start + chunk.length
            if chunk.drafts:
                end += len(tokens) - 1 - len(chunk.drafts)
                sequence.scheduled = end
            sequence.computed = end
        elif sequence.wants_prompt_logprobs:
            return None  # the prompt starts again, and the same token will be drawn again
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs += row.prompt_logprobs
        finish: Finish | None = None
        if tokens:
            if not sequence.generated:
                sequence.watch.enter(Part.DECODE if current else Part.PREEMPTED, now)
            reason, tokens = self._append(sequence, tokens)
            self._generation_tokens += len(tokens)
            if reason is not None:
                stop = tokens[-1] if reason is FinishReason.STOP else None
                finish = self._end(sequence, reason, now, stop_token_id=stop)
        elif sequence.computed >= sequence.limit:  # max_tokens 0: the prompt was all there was to do
            finish = self._end(sequence, FinishReason.LENGTH, now)
        if finish is None and current:
            if not decoding:
                self._unpublished.append((sequence, sequence.incarnation))
            elif self._demand.windows:
                self._tables.drop_behind_windows(sequence)
        if not tokens and finish is None:
            return None
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if sequence.prompt_logprobs:
            prompt_logprobs = tuple(sequence.prompt_logprobs)
            sequence.prompt_logprobs.clear()
            sequence.wants_prompt_logprobs = False
        return Output(sequence.request.request_id, tokens, row.logprobs[: len(tokens)], prompt_logprobs, finish)

    def _append(self, sequence: Sequence, tokens: tuple[int, ...]) -> tuple[FinishReason | None, tuple[int, ...]]:
        """Add sampled tokens up to the one that ends the sequence; returns why it ends, if it does, and those added."""
        known, limit, stopping = sequence.token_ids, sequence.limit, sequence.stopping_ids
        for count, token in enumerate(tokens, 1):
            known.append(token)
            if token in stopping:
                return FinishReason.STOP, tokens[:count]
            if len(known) >= limit:
                return FinishReason.LENGTH, tokens[:count]
        return None, tokens

    def _fail(self, sequence: Sequence, error: str, now: int) -> Finish:
        """End one request whose row failed, and drop every cached prefix its KV may have come from or gone to."""
        self.settle()  # or what others of this step computed with the same prefix would be published after it is forgotten
        self._prefix.forget(sequence.request.namespace, sequence.encoded)
        return self._end(sequence, FinishReason.ERROR, now, error=error, publish=False)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: int,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
        publish: bool = True,
    ) -> Finish:
        if sequence.state is State.RUNNING:
            self._leave(sequence)
            if publish:
                self._ended.append(sequence)
            else:
                self._tables.vacate(sequence)
        else:
            _discard(self._waiting, sequence)
        sequence.state = State.FINISHED
        sequence.held_for = None
        del self._live[sequence.request.request_id]
        return sequence.finish(reason, now, stop_token_id=stop_token_id, error=error)

    def _leave(self, sequence: Sequence) -> None:
        """Give back a running sequence's slot; its blocks are still its own."""
        self._slots.append(sequence.slot)
        self._released_slots.append(sequence.slot)
        sequence.slot = -1
        _discard(self._running, sequence)

    def check(self) -> None:
        """Assert every invariant: blocks, tree, slots, ranges. Slow; for tests."""
        self._tables.check([*self._running, *self._ended], [*(s for s, _ in self._unpublished), *self._ended])
        in_use = [s.slot for s in self._running]
        assert sorted(in_use + self._slots) == list(range(self.config.max_num_seqs)), "slots were lost or doubled"
        assert len(self._live) == len(self._running) + len(self._waiting)
        for group, state in ((self._running, State.RUNNING), (self._waiting, State.WAITING)):
            assert [s.rank for s in group] == sorted(s.rank for s in group)
            for sequence in group:
                assert sequence.state is state
                assert self._live[sequence.request.request_id] is sequence
                self._check_sequence(sequence)
        if not self._running and not self._ended:
            assert self._pool.free_blocks == self._pool.num_blocks, "blocks are held by no one"

    def _check_sequence(self, sequence: Sequence) -> None:
        pending = sum(
            chunk.sample
            for plan, rows in self._in_flight
            for chunk, (who, _) in zip(plan.chunks, rows, strict=True)
            if who is sequence
        )
        assert pending == sequence.pending
        known = len(sequence.token_ids) + pending
        assert known <= sequence.limit
        if sequence.state is State.WAITING:
            assert sequence.slot == -1
            assert sequence.room == sequence.scheduled == sequence.computed == 0
            assert not any(sequence.tables)
            return
        assert 0 <= sequence.computed <= sequence.scheduled <= known + self._depth
        assert sequence.scheduled <= sequence.room


def _discard(ranked: list[Sequence], sequence: Sequence) -> None:
    at = bisect_left(ranked, sequence.rank, key=_BY_RANK)
    assert ranked[at] is sequence
    del ranked[at]
