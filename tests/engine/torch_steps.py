"""A tiny stand-in for the scheduler: it hands out scattered blocks and builds step plans by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from headrace.control.request import Sampling
from headrace.control.step import BlockAppend, Chunk, SlotInit, StepPlan, StepResult, TokenLogprobs
from headrace.engine.backend import Limits
from headrace.engine.executors.torch import BACKEND
from headrace.spec.accounting import cache_layout
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate


@dataclass
class Sequence:
    slot: int
    prompt: list[int]
    sampling: Sampling
    computed: int = 0
    generated: list[int] = field(default_factory=list)
    blocks: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    owned: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated


class Engine:
    """Runs sequences of one model through the executor, a plan at a time."""

    def __init__(self, model, *, num_blocks=400, block_tokens=8, max_num_seqs=64, max_model_len=256, seed=0):
        self.model = model
        self.layout = cache_layout(model.spec, model.kv_precision, block_tokens)
        self.executor = model.executor(self.layout, Limits(num_blocks, max_num_seqs, max_model_len, 4096))
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.free_slots = list(range(max_num_seqs))
        self.waiting: list[SlotInit] = []
        self.releases: list[int] = []
        self.steps = 0
        self.copies: list = []

    @classmethod
    def of(
        cls,
        model: str,
        *,
        options=(),
        weights="auto",
        kv="auto",
        attention="auto",
        load_format="auto",
        threads=None,
        **sizes,
    ):
        config = EngineConfig(
            model=model,
            weights=weights,
            kv=kv,
            attention=attention,
            load_format=load_format,
            options=tuple(options),
            threads=threads,
        )
        files = locate(model)
        assert BACKEND.unavailable(files, config) is None
        return cls(BACKEND.load(files, config), **sizes)

    def add(self, prompt, generated=(), **sampling) -> Sequence:
        sampling = Sampling(**{"max_tokens": 64, "temperature": 0.0} | sampling)
        sequence = Sequence(self.free_slots.pop(0), list(prompt), sampling, generated=list(generated))
        tokens = tuple(sequence.tokens)
        self.waiting.append(SlotInit(sequence.slot, f"r{sequence.slot}", tokens, len(sequence.prompt), sampling))
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self.releases.append(sequence.slot)
        self.free_slots.append(sequence.slot)
        self.free.extend(sequence.owned)

    def plan(self, work: list[tuple[Sequence, int]], drafts: dict[int, tuple[int, ...]] | None = None) -> StepPlan:
        """A plan that computes so many further tokens of each sequence; the last known one is sampled from."""
        appends, chunks = [], []
        for sequence, count in work:
            extra = (drafts or {}).get(sequence.slot, ())
            end = sequence.computed + count + len(extra)
            needed = -(-end // self.layout.block_tokens)
            if needed > sequence.blocks:
                for group in range(self.layout.num_groups):
                    ids = tuple(self.free.pop() for _ in range(needed - sequence.blocks))
                    sequence.owned.extend(ids)
                    appends.append(BlockAppend(sequence.slot, group, sequence.blocks, ids))
                sequence.blocks = needed
            sample = sequence.computed + count == sequence.known
            chunks.append(Chunk(sequence.slot, sequence.computed, count + len(extra), sample, extra))
        self.steps += 1
        plan = StepPlan(
            self.steps, tuple(self.releases), tuple(self.waiting), tuple(appends), tuple(self.copies), tuple(chunks)
        )
        self.releases, self.waiting, self.copies = [], [], []
        return plan

    def step(self, work, drafts=None) -> StepResult:
        result = self.executor.submit(self.plan(work, drafts)).result()
        for (sequence, count), row in zip(work, result.rows, strict=True):
            assert row.slot == sequence.slot
            sequence.computed += count
            if row.token_ids and drafts:
                sequence.computed += len(row.token_ids) - 1
            sequence.generated.extend(row.token_ids)
            sequence.logprobs.extend(row.logprobs)
            sequence.prompt_logprobs.extend(row.prompt_logprobs)
            if row.error is not None:
                sequence.errors.append(row.error)
        return result

    def generate(self, sequences: list[Sequence], tokens: int, chunk: int = 10**9) -> None:
        """Prefill in chunks and decode, all sequences together, until each has `tokens` new ones."""
        while True:
            work = [
                (s, min(chunk, s.known - s.computed)) for s in sequences if len(s.generated) < tokens and not s.errors
            ]
            if not work:
                return
            self.step(work)

    def close(self) -> None:
        self.executor.close()
