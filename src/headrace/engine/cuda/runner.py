"""The steps of the CUDA backend: plan → one copy of integers → a graph or launches → ids, without waiting for the device.

`submit` only launches: the ids that a step samples stay on the device, where the next step takes them, and come to the host
behind it. The host waits in one place, `CudaStep.result`, and sooner only if a row's sampling needs the ids of earlier steps
on the host (penalties, grammars).
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import triton

from headrace.control.step import Chunk, RowResult, StepPlan, StepResult, TokenLogprobs
from headrace.engine.backend import Limits, LogitsWatch
from headrace.engine.batch import Slots, checked_init
from headrace.engine.cuda.decoder import PACKED_ROWS, SHORT_TILE, Decoder, DeviceStep
from headrace.engine.cuda.graphs import MAX_GROUPS, DecodeGraphs, graph_sizes
from headrace.engine.cuda.metadata import Metadata, Packed
from headrace.engine.cuda.prefixes import shared_prefixes
from headrace.engine.cuda.sampling import LogprobsInFlight, alter, altered_rows, draw_parameters, logprobs, to_host
from headrace.engine.grammars import Grammars
from headrace.engine.kernels.blocks import copy_blocks, scatter
from headrace.engine.kernels.compilers import Compilers
from headrace.engine.kernels.launchers import separate_launchers
from headrace.engine.kernels.prefill import HOPPER_TILE
from headrace.engine.kernels.sample import draw, greedy
from headrace.engine.sampler.draws import uniforms
from headrace.engine.sampler.rows import NOT_FINITE, NOTHING_ALLOWED, Rows
from headrace.engine.sampler.state import SamplingState
from headrace.spec.cache import CacheLayout

MIXED_TOKENS = (64, 128, 256, 512)
"""Prompt tokens of captured mixed steps; longer chunks keep the device busy enough to be launched one kernel at a time."""
DEEP_TOKENS = (256, 512)
"""Of these, captured a second time for chunks over long contexts, with the warp-specialized kernel."""
DEEP_START = 1024
"""Cached keys of a chunk from which on it pays to gather them for that kernel."""
LAST_TOKENS, LAST_SPANS = 2048, 4
"""From so many prompt tokens on, and with at most so many spans of rows whose queries count in the last layer, only those are
projected there; each span is a product of its own."""
SORTED_ROWS = 32
"""From so many rows on, the longest contexts go first: attention that starts last should end soon."""
COMPILE_THREADS, MORE_THREADS = 12, 4
"""Threads that compile, and how many more than processes there are where those do: some wait for a C compiler or load what was made."""
COMPILE_SWITCH_S = 0.0005
"""How long one of them may keep the interpreter while others wait for it."""

_LOGIT_ROWS = 64
"""Rows of logits held at once while prompt log-probabilities are computed."""


def gathered_of(starts: np.ndarray) -> np.ndarray:
    """Rows that the cached keys of chunks take once they are gathered."""
    return -(-starts // HOPPER_TILE) * HOPPER_TILE


@dataclass(slots=True)
class _Row:
    """A chunk's place in a step: its sampled row, the incarnation of its slot, the position of the token it samples."""

    chunk: Chunk
    generation: int
    sampled: int
    position: int
    first: int = 0
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt: list[LogprobsInFlight] = field(default_factory=list)


class CudaStep:
    """A step in flight."""

    def __init__(self, runner: Runner, plan: StepPlan) -> None:
        self.plan = plan
        self.rows: list[_Row] = []
        self.host: np.ndarray | None = None
        self.bad_rows: torch.Tensor | None = None
        self.reported: tuple[list[int], LogprobsInFlight] | None = None
        self.lost: torch.Tensor | None = None
        self.begin = time.perf_counter()
        self.events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._runner = runner
        self._result: StepResult | None = None

    def done(self) -> bool:
        return self._result is not None or self.events is None or self.events[1].query()

    def result(self) -> StepResult:
        while self._result is None:
            self._runner.finish_oldest()
        return self._result

    def wait(self) -> float:
        """Wait for the device; seconds that it worked on the step."""
        if self.events is None:
            return 0.0
        self.events[1].synchronize()
        return self.events[0].elapsed_time(self.events[1]) / 1e3

    def set(self, result: StepResult) -> None:
        self._result = result


class Runner:
    """Owns slots, sampling state and graphs of one decoder; belongs to one thread."""

    def __init__(
        self,
        decoder: Decoder,
        layout: CacheLayout,
        limits: Limits,
        grammars: Grammars,
        vocab_size: int,
        group: int,
        watch: LogitsWatch | None = None,
    ) -> None:
        self._decoder = decoder
        self._grammars = grammars
        self._watch = watch
        self._vocab = vocab_size
        self._block_tokens = layout.block_tokens
        self._slots = Slots(layout, limits.max_num_seqs, limits.max_model_len, tails=False)
        self._known = np.zeros(limits.max_num_seqs, np.int64)
        self._generation = np.zeros(limits.max_num_seqs, np.int64)
        self._sampling = SamplingState(limits.max_num_seqs)
        self._broken: dict[int, str] = {}
        self._flight: deque[CudaStep] = deque()
        self._seqs = limits.max_num_seqs
        self._tile_rows = PACKED_ROWS // triton.next_power_of_2(group)
        self._planner = decoder.planner
        self._one_group = layout.num_groups == 1 and layout.groups[0].window is None and self._planner is None
        device = decoder.x.device
        self._cuda = device.type == "cuda"
        self._device = device
        tokens, seqs = decoder.tokens, limits.max_num_seqs
        capacity = 3 * tokens + 4 * seqs + 2 * (tokens // 64 + seqs) + 16 * seqs + 3 * (seqs + MAX_GROUPS) + 8192
        capacity += 2 * self._slots.tables.size + 2 * limits.num_blocks // 8 + (2 * seqs + 4) * layout.num_groups
        self.metadata = Metadata(capacity, device)
        self._out = torch.zeros(3, decoder.rows, dtype=torch.int32, device=device)
        self._bad_rows = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._ring = [torch.zeros(3, decoder.rows, dtype=torch.int32, pin_memory=self._cuda) for _ in range(6)]
        self._next_ring = 0
        self.graphs = DecodeGraphs()
        self._sizes = np.array(graph_sizes(decoder.rows))
        self._graphed = False
        self._mixed_keys: list[tuple[str, int, int]] = []

    # Graphs

    def warm_up(self, *, graphs: bool, compilers: Compilers | None = None) -> None:
        """Compile the kernels of decode steps by running each size on padding alone, then capture the sizes as graphs.

        `compilers`: processes that do the compiling; without them threads do.
        """
        if self._cuda:
            with compilers.serving() if compilers else nullcontext():
                self._compile(self._one_group, 0 if compilers is None else compilers.count)
        # A collection in the middle of a capture may free what an earlier engine held, which the capture does not survive.
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._warm_up_decode(graphs=graphs)
            self.warm_up_mixed(graphs=graphs)
        finally:
            if collecting:
                gc.enable()
        self._mixed_keys = self._mixed_sizes() if graphs else []
        self._graphed = graphs

    def _warm_up_decode(self, *, graphs: bool) -> None:
        for rows in self._sizes[::-1].tolist():
            for shared in (False, True) if self._one_group and rows >= 4 else (False,):
                step, ids, bad, sample_slots = self._padding(rows, shared)
                self._launch_decode(step, ids, bad, sample_slots, some_layers=graphs)
                if graphs:
                    self.graphs.capture(
                        (rows, shared),
                        lambda s=step, i=ids, b=bad, t=sample_slots: self._launch_decode(s, i, b, t),
                    )

    def _compile(self, shareable: bool, processes: int = 0) -> None:
        """Compile side by side what would otherwise be compiled one after the other when it is first launched.

        `processes`: how many of them compile what the threads ask for.
        """
        jobs: list[Callable[[], object]] = []
        steps: list[DeviceStep] = []
        decoder, out = self._decoder, self._out
        # Slots of -1 are padding everywhere, and chunks and tiles of -1 are empty.
        blank = torch.full((8 + decoder.tokens,), -1, dtype=torch.int32, device=self._device)
        kinds: dict[tuple[object, ...], int] = {}
        for rows in self._sizes.tolist():
            kinds.setdefault(decoder.kernels_of(rows), rows)
        attended, shapes = set(), set()
        for rows in kinds.values():
            steps.append(step := DeviceStep(blank[:rows], blank[:rows], blank[:rows], rows))
            # Two threads that find a kernel missing would both compile it.
            if (shape := decoder.decode_kernel(rows)) in shapes:
                attended.add(id(step))
            shapes.add(shape)
            jobs.append(
                lambda n=rows, s=step: greedy(
                    decoder.logits[:n], out[0], out[1], decoder.last_ids, blank[:n], pdl=decoder.greedy_pdl(n, s)
                )
            )
        cascades = []
        if shareable and decoder.rows >= 4:
            tiles = blank[:9].view(3, 3)
            cascades.append(DeviceStep(blank[:4], blank[:4], blank[:4], 4, firsts=blank[:4], prefix_tiles=tiles))
        rows = min(512, decoder.tokens)
        deep: list[DeviceStep] = []
        hopper = decoder.gathered_rows > 0
        sizes = (SHORT_TILE, HOPPER_TILE) if hopper else (SHORT_TILE, 128, 256)
        for tile_rows in sizes if decoder.staged is None else (SHORT_TILE,):
            chunks, tiles = blank[4:8].view(1, 4), blank[4:6].view(1, 2)
            step = DeviceStep(blank[:rows], blank[:rows], blank[:rows], min(8, rows - 1), chunks, tiles, tile_rows)
            if hopper and tile_rows > SHORT_TILE:
                # A tile of a chunk of no tokens, whose one block is read from the first rows and not stored.
                step.chunks, step.tiles = torch.zeros_like(chunks), torch.zeros_like(tiles)
                step.offsets, step.gathered = torch.zeros_like(blank[:4]), torch.zeros_like(blank[:1])
                deep.append(replace(step, gathered=None, counts=torch.zeros_like(blank[:4])))
            steps.append(step)
        beside = {}
        for count in sorted({r for _, r, _ in self._mixed_sizes()}):
            beside.setdefault(decoder.decode_kernel(count), count)
        jobs_beside = []
        for shape, count in beside.items():
            if shape != decoder.decode_kernel(min(8, rows - 1)):
                ids = blank[: count + 16]
                step = DeviceStep(ids, ids, ids, count, blank[4:8].view(1, 4), blank[4:6].view(1, 2), SHORT_TILE)
                jobs_beside += decoder.decode_jobs(step)
        # Heads of steps with prompts, whose rows are normed by a kernel before.
        picked = {self._mixed_logits(r, t) for _, r, t in self._mixed_sizes()} | set(self._sizes.tolist())
        heads = {decoder.head_config(n): n for n in picked}
        for config, n in heads.items():
            if config is not None:
                jobs.append(lambda n=n: decoder.head(decoder.picked_x[:n]))
        one, rules = out[2, :1], torch.ones(1, 5, device=self._device)
        jobs.append(lambda: draw(decoder.logits[:1], out[0], decoder.last_ids, one, one, rules))
        jobs.append(lambda: greedy(decoder.logits[:1], out[0], out[2], decoder.last_ids, one, masked=True))
        pairs = torch.zeros(1, 2, dtype=torch.int32, device=self._device)
        jobs.append(lambda: copy_blocks(decoder.pool.blocks, pairs))
        jobs.append(lambda: scatter(self._bad_rows, pairs))
        # Of the steps whose products are the library's, one launches all that is not attention.
        plain = [s for s in steps if not (s.decode_rows == len(s.ids) and decoder.fused(len(s.ids)))]
        partial = {id(s) for s in [*plain[1:], *cascades]}
        # Attention of prompts takes longest to compile, then that of shared prefixes: two kernels, one after the other.
        made = [job for s in deep for job in decoder.compile_jobs(s, others=False)[-1:]]
        for s in [steps[-1], *cascades, *steps[-2::-1]]:
            made += decoder.compile_jobs(s, attention=id(s) not in attended, others=id(s) not in partial)
        jobs = made + jobs_beside + jobs

        def one_job(job: Callable[[], object]) -> None:
            torch.cuda.set_device(self._device)
            job()

        threads = max(COMPILE_THREADS, processes + MORE_THREADS) if separate_launchers() else 1
        # A thread back from the compiler's own code waits for the interpreter behind all that translate a kernel just then, and
        # each of these keeps it that long.
        interval = sys.getswitchinterval()
        sys.setswitchinterval(COMPILE_SWITCH_S)
        try:
            with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
                list(pool.map(one_job, jobs))
        finally:
            sys.setswitchinterval(interval)
        torch.cuda.synchronize(self._device)

    def _mixed_padding(self, kind: str, rows: int, tokens: int) -> Packed:
        return self.metadata.send(
            {
                "ids": np.zeros(rows + tokens, np.int32),
                "slots": np.full(rows + tokens, -1, np.int32),
                "positions": np.zeros(rows + tokens, np.int32),
                **self._mixed_tables(rows, tokens, [], [], [], [], [0, 1] if kind == "deep" else None),
            }
        )

    def warm_up_mixed(self, *, graphs: bool) -> None:
        """The same for steps of running sequences beside a short chunk of prompts."""
        for kind, rows, tokens in self._mixed_sizes():
            step, sample = self._mixed_step(self._mixed_padding(kind, rows, tokens), rows)
            self._launch_mixed(step, sample, some_layers=graphs)
            if graphs:
                self.graphs.capture((kind, rows, tokens), lambda s=step, t=sample: self._launch_mixed(s, t))

    def _mixed_sizes(self) -> list[tuple[str, int, int]]:
        """Kind ("mixed", or "deep" over long contexts), decode rows and prompt tokens of graphed mixed steps, descending."""
        if self._planner is not None:
            return []  # its plans of mixed steps are not captured
        most, deep = self._decoder.rows, self._decoder.gathered_rows > DEEP_START
        sizes = [("mixed", r, t) for t in MIXED_TOKENS for r in (8, 32, 64, 128, 192, 256)]
        sizes += [("deep", r, t) for t in DEEP_TOKENS for r in (16, 64, 128, 256) if deep]
        return sorted({(k, min(r, most), t) for k, r, t in sizes if min(r, most) + t <= self._decoder.tokens})[::-1]

    def _mixed_tables(
        self, rows: int, tokens: int, chunks, tiles, picked, sample, counts: Sequence[int] | None
    ) -> dict[str, np.ndarray]:
        """Arrays of a graphed mixed step, padded to what its size may hold; the last chunk is always padding.

        `counts`: tiles that count, and parts of their cached keys, of a deep one.
        """
        most = tokens // 16
        padded = np.zeros((most, 4), np.int32)
        padded[: len(chunks)] = np.reshape(chunks, (-1, 4))
        all_tiles = np.zeros((tokens // SHORT_TILE + most, 2), np.int32)
        all_tiles[:, 0] = most - 1
        all_tiles[: len(tiles)] = np.reshape(tiles, (-1, 2))
        deep = {}
        if counts is not None:
            cached = gathered_of(padded[:, 1])
            deep = {
                "offsets": np.cumsum(cached) - cached,
                "counts": np.array(counts),
                "gathered": cached.sum(keepdims=True),
            }
        logits = self._mixed_logits(rows, tokens)
        picks, slots = np.zeros(logits, np.int32), np.full(logits, -1, np.int32)
        picks[: len(picked)], slots[: len(sample)] = picked, sample
        return {"chunks": padded, "tiles": all_tiles, "picked": picks, "sample": slots, **deep}

    def _mixed_logits(self, rows: int, tokens: int) -> int:
        """Rows of logits of a graphed mixed step."""
        return min(rows + tokens // 16, self._decoder.rows)

    def _mixed_step(self, meta: Packed, rows: int) -> tuple[DeviceStep, torch.Tensor]:
        step = DeviceStep(
            meta["ids"], meta["slots"], meta["positions"], rows, meta["chunks"].view(-1, 4), meta["tiles"].view(-1, 2),
            SHORT_TILE, picked=meta["picked"],
        )  # fmt: skip
        if "counts" in meta:
            step.tile_rows, step.offsets = HOPPER_TILE, meta["offsets"]
            step.counts, step.gathered = meta["counts"], meta["gathered"]
        return step, meta["sample"]

    def _launch_mixed(self, step: DeviceStep, sample: torch.Tensor, *, some_layers: bool = False) -> None:
        count = len(sample)
        logits = self._decoder.run(step, self._bad_rows[: len(step.ids)], some_layers=some_layers)
        greedy(logits, self._out[0, :count], self._out[1, :count], self._decoder.last_ids, sample)

    def _padding(self, rows: int, shared: bool):
        """A decode step of nothing but padding, whose views are those of every step of that size."""
        blank = np.full(rows, -1, np.int32)
        arrays = {
            "ids": np.zeros(rows, np.int32),
            "slots": blank,
            "positions": np.zeros(rows, np.int32),
            "sample": blank,
        }
        if shared:
            arrays |= {"firsts": np.zeros(rows, np.int32), "prefix": np.zeros((self._max_tiles(rows), 3), np.int32)}
        made = self._decode_step(self.metadata.send(arrays), rows)
        if self._planner is not None:
            none = np.zeros(0, np.int64)
            made[0].planned = self._planner.decode(rows, none, none, self._slots.tables)
        return made

    def _max_tiles(self, rows: int) -> int:
        return -(-rows // self._tile_rows) + MAX_GROUPS

    def _decode_step(self, meta: Packed, rows: int):
        step = DeviceStep(meta["ids"], meta["slots"], meta["positions"], rows)
        if "prefix" in meta:
            step.firsts, step.prefix_tiles = meta["firsts"], meta["prefix"].view(-1, 3)
        return step, self._out[0, :rows], self._out[1, :rows], meta["sample"]

    def _launch_decode(self, step: DeviceStep, ids, bad, sample_slots, *, some_layers: bool = False) -> None:
        rows = len(ids)
        logits = self._decoder.run(step, some_layers=some_layers)
        greedy(logits, ids, bad, self._decoder.last_ids, sample_slots, pdl=self._decoder.greedy_pdl(rows, step))

    # Steps

    def submit(self, plan: StepPlan) -> CudaStep:
        """Launch a step; it is waited for in its `result`. A range in a profiler's timeline, like the wait."""
        if not self._cuda:
            return self._submit(plan)
        with torch.cuda.nvtx.range(f"step {plan.step_id}: {len(plan.chunks)} rows"):
            return self._submit(plan)

    def _submit(self, plan: StepPlan) -> CudaStep:
        step = CudaStep(self, plan)
        appended = self._change_slots(plan)
        for chunk in plan.chunks:
            if chunk.drafts:
                raise NotImplementedError("the cuda backend does not verify drafts yet")
        if self._cuda:
            step.events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            step.events[0].record()
        single = [c for c in plan.chunks if c.length == 1]
        longer = [c for c in plan.chunks if c.length > 1]
        if not plan.chunks:
            self._changes(self.metadata.send(self._change_arrays(plan, appended)))
        elif not longer:
            self._submit_decode(step, plan, single, appended)
        else:
            self._submit_mixed(step, plan, single, longer, appended)
        if step.events is not None:
            step.events[1].record()
        self._flight.append(step)
        return step

    def finish_oldest(self) -> None:
        """Wait for the oldest step in flight and make its result."""
        step = self._flight.popleft()
        if self._cuda:
            with torch.cuda.nvtx.range(f"wait for step {step.plan.step_id}"):
                compute_s = step.wait()
        else:
            compute_s = step.wait()
        self._finish(step, compute_s)

    def reset(self) -> None:
        """Let what was launched run out and forget it; slots are emptied by the next inits."""
        self._flight.clear()
        if self._cuda:
            torch.cuda.synchronize(self._device)
        for slot in range(self._seqs):
            self._grammars.release(slot)
        self._broken.clear()
        self._generation += 1

    def _change_slots(self, plan: StepPlan) -> list[np.ndarray]:
        """Apply what the plan changes on the host; returns flat indices of block-table entries that are new."""
        for slot in plan.releases:
            self._grammars.release(slot)
            self._broken.pop(slot, None)
        for init in plan.inits:
            slot = init.slot
            self._broken.pop(slot, None)
            error = checked_init(init, self._vocab) or self._grammars.admit(init)
            if error is not None:
                # Computed like any other, on harmless input; only its result says what was wrong.
                self._broken[slot] = error
                sampling = type(init.sampling)(max_tokens=1, temperature=0.0)
                init = type(init)(slot, init.request_id, (0,) * len(init.token_ids), init.prompt_length, sampling)
            self._slots.init(init)
            self._known[slot] = len(init.token_ids)
            self._generation[slot] += 1
            self._sampling.admit(slot, init.sampling)
        _, _, blocks = self._slots.tables.shape
        appended = []
        for append in plan.appends:
            self._slots.append(append)
            base = (append.group * self._seqs + append.slot) * blocks + append.first
            appended.append(np.arange(base, base + len(append.block_ids)))
        return appended

    def _change_arrays(self, plan: StepPlan, appended: list[np.ndarray]) -> dict[str, np.ndarray]:
        arrays = {}
        if appended:
            where = np.unique(np.concatenate(appended))
            arrays["tables"] = np.stack([where, self._slots.tables.reshape(-1)[where]], 1).astype(np.int32)
        if plan.copies:
            arrays["copies"] = np.array([(c.source, c.target) for c in plan.copies], np.int32)
        if self._decoder.staged is not None:
            arrays |= self._decoder.staged.plan(plan, self._slots.tables)
        return arrays

    def _changes(self, meta: Packed) -> None:
        """Launch the plan's changes to block tables and blocks."""
        if "tables" in meta:
            scatter(self._decoder.tables.view(-1), meta["tables"].view(-1, 2))
        if "copies" in meta:
            copy_blocks(self._decoder.pool.blocks, meta["copies"].view(-1, 2))
        if (staged := self._decoder.staged) is not None:
            for group in range(len(self._slots.tables)):
                if (name := f"restaged {group}") in meta:
                    staged.restage(self._decoder.pool, group, meta[name].view(-1, 2))

    def _rows_of(self, chunks: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(ids, slots, positions, slots to sample for) of chunks of one token."""
        count = len(chunks)
        slots = np.fromiter((c.slot for c in chunks), np.int64, count)
        positions = np.fromiter((c.start for c in chunks), np.int64, count)
        sample = np.fromiter((c.slot if c.sample else -1 for c in chunks), np.int64, count)
        ids = np.where(positions < self._known[slots], self._slots.tokens[slots, positions], -1)
        return ids, slots, positions, sample

    def _submit_decode(self, step: CudaStep, plan: StepPlan, chunks: list[Chunk], appended: list[np.ndarray]) -> None:
        ids, slots, positions, sample = self._rows_of(chunks)
        count = len(chunks)
        padded = int(self._sizes[np.searchsorted(self._sizes, count)])
        shared = None
        if self._one_group and count >= 4:
            shared = shared_prefixes(
                self._slots.tables[0, slots], positions, self._block_tokens, self._tile_rows, self._max_tiles(padded)
            )
        order = None if shared is None else shared.order
        if order is None and count >= SORTED_ROWS:
            order = np.argsort(-positions, kind="stable")
        if order is not None:
            ids, slots, positions, sample = ids[order], slots[order], positions[order], sample[order]
            chunks = [chunks[i] for i in order.tolist()]

        def fill(values: np.ndarray, blank: int) -> np.ndarray:
            out = np.full(padded, blank, np.int32)
            out[:count] = values
            return out

        arrays = {
            "ids": fill(ids, 0),
            "slots": fill(slots, -1),
            "positions": fill(positions, 0),
            "sample": fill(sample, -1),
        }
        if shared is not None:
            arrays |= {"firsts": fill(shared.firsts, 0), "prefix": shared.tiles}
        order = {id(c): i for i, c in enumerate(chunks)}
        step.rows = [self._row(c, order[id(c)], order[id(c)]) for c in plan.chunks]
        plan_rows = self._plan_sampling(step, slots, [c.sample for c in chunks], arrays)
        arrays |= self._change_arrays(plan, appended)
        meta = self.metadata.send(arrays)
        self._changes(meta)
        planned = self._planner and self._planner.decode(padded, slots, positions, self._slots.tables)
        if not (self._graphed and self.graphs.replay((padded, shared is not None))):
            launch = self._decode_step(meta, padded)
            launch[0].planned = planned
            self._launch_decode(*launch)
        self._sample(step, self._decoder.logits[:count], plan_rows, meta)
        if (positions < self._slots.prompt_lengths[slots] - 1).any():  # prompts that came in pieces of one token
            self._prompt_logprobs(step)

    def _mixed_size(self, kind: str, rows: int, lengths: np.ndarray) -> tuple[str, int, int] | None:
        """The least graphed size of a kind that holds a mixed step, if there is one."""
        tokens = int(lengths.sum())
        if not self._graphed or tokens > MIXED_TOKENS[-1]:
            return None
        fitting = [
            (t, r) for k, r, t in self._mixed_keys if k == kind and r >= rows and t >= tokens and len(lengths) < t // 16
        ]
        if not fitting:
            return None
        tokens, rows = min(fitting)
        return kind, rows, tokens

    def _submit_mixed(
        self, step: CudaStep, plan: StepPlan, single: list[Chunk], longer: list[Chunk], appended: list[np.ndarray]
    ) -> None:
        ids, slots, positions, _ = self._rows_of(single)
        lengths = np.fromiter((c.length for c in longer), np.int64, len(longer))
        starts = np.fromiter((c.start for c in longer), np.int64, len(longer))
        long_slots = np.fromiter((c.slot for c in longer), np.int64, len(longer))
        n, tokens = len(single), int(lengths.sum())
        keep_all = any(self._sampling.rules[c.slot].prompt_logprobs is not None for c in plan.chunks)
        longest = int(lengths.max())
        cached = gathered_of(starts)
        hopper = longest > SHORT_TILE and cached.sum() <= self._decoder.gathered_rows > 0
        deep = hopper and longest > HOPPER_TILE and int(starts.max()) >= DEEP_START
        size = None if keep_all else self._mixed_size("deep" if deep else "mixed", n, lengths)
        base, room = size[1:] if size else (n, tokens)
        firsts = base + np.cumsum(lengths) - lengths
        if (size and not deep) or longest <= SHORT_TILE or self._decoder.staged is not None:
            tile_rows = SHORT_TILE
        elif self._decoder.gathered_rows:
            tile_rows = HOPPER_TILE if hopper else SHORT_TILE
        else:
            tile_rows = 128 if longest < 4096 else 256
        # The longest walks first: a tile's work grows with its last key.
        tiles = np.concatenate(
            [
                np.stack([np.full(-(-m // tile_rows), i), np.arange(0, m, tile_rows)], 1)
                for i, m in enumerate(lengths.tolist())
            ]
        )
        tiles = tiles[np.argsort(-(starts[tiles[:, 0]] + tiles[:, 1]), kind="stable")]
        row_ids, row_positions = np.zeros((2, base + room), np.int32)
        row_slots = np.full(base + room, -1, np.int32)
        row_ids[:n], row_slots[:n], row_positions[:n] = ids, slots, positions
        for chunk, first in zip(longer, firsts.tolist(), strict=True):
            rows, end = slice(first, first + chunk.length), chunk.start + chunk.length
            row_ids[rows] = self._slots.tokens[chunk.slot, chunk.start : end]
            if (unknown := end - int(self._known[chunk.slot])) > 0:
                row_ids[max(first, rows.stop - unknown) : rows.stop] = -1
            row_slots[rows], row_positions[rows] = chunk.slot, np.arange(chunk.start, end)

        sampled = list(enumerate(single))
        sampled += [(int(f) + c.length - 1, c) for f, c in zip(firsts, longer, strict=True) if c.sample]
        at = {id(c): i for i, (_, c) in enumerate(sampled)}
        first_of = {id(c): i for i, c in enumerate(single)}
        first_of |= {id(c): int(f) for f, c in zip(firsts, longer, strict=True)}
        step.rows = [self._row(c, at.get(id(c), -1), first_of[id(c)]) for c in plan.chunks]
        sampled_slots = np.fromiter((c.slot for _, c in sampled), np.int64, len(sampled))
        picked = [i for i, _ in sampled]
        sample = [c.slot if c.sample else -1 for _, c in sampled]
        chunks = np.stack([long_slots, starts, lengths, firsts], 1)
        arrays = {"ids": row_ids, "slots": row_slots, "positions": row_positions}
        last_rows = None
        if size:
            parts = self._decoder.parts(len(tiles), int(starts.min())) if deep else 1
            counts = [len(tiles), parts] if deep else None
            arrays |= self._mixed_tables(base, room, chunks, tiles, picked, sample, counts)
        else:
            arrays |= {"chunks": chunks, "tiles": tiles}
            if hopper:
                arrays["offsets"], arrays["gathered"] = np.cumsum(cached) - cached, cached.sum(keepdims=True)
            ends = [(i, (c.length - 1) // tile_rows * tile_rows) for i, c in enumerate(longer) if c.sample]
            if ends:
                arrays["last_tiles"] = np.array(ends, np.int32)
            spans = [(0, n)] if n else []
            spans += [(int(firsts[i]) + m, int(firsts[i]) + min(m + tile_rows, longer[i].length)) for i, m in ends]
            if len(spans) <= LAST_SPANS and tokens >= LAST_TOKENS and self._planner is None:
                last_rows = spans
            if sampled:
                # In a size of decode steps: the library's kernels for it are loaded, which otherwise waits for the device.
                count = int(self._sizes[np.searchsorted(self._sizes, len(sampled))])
                arrays |= {"picked": np.zeros(count, np.int32), "sample": np.full(count, -1, np.int32)}
                arrays["picked"][: len(picked)], arrays["sample"][: len(sample)] = picked, sample
        wanted = self._plan_sampling(step, sampled_slots, [c.sample for _, c in sampled], arrays)
        arrays |= self._change_arrays(plan, appended)
        meta = self.metadata.send(arrays)
        self._changes(meta)
        if size:
            self.graphs.replay(size)
        else:
            device_step = DeviceStep(
                meta["ids"], meta["slots"], meta["positions"], n, meta["chunks"].view(-1, 4),
                meta["tiles"].view(-1, 2), tile_rows, picked=meta["picked"] if sampled else None,
                keep_all=keep_all, last_tiles=meta["last_tiles"].view(-1, 2) if ends else None, last_rows=last_rows,
                offsets=meta["offsets"] if hopper else None,
                gathered=meta["gathered"] if hopper and starts.any() else None,
                planned=self._planner
                and self._planner.mixed(slots, positions, long_slots, starts, lengths, self._slots.tables),
            )  # fmt: skip
            logits = self._decoder.run(device_step, self._bad_rows[: base + room], head=bool(sampled))
            if sampled:
                greedy(logits, self._out[0, :count], self._out[1, :count], self._decoder.last_ids, meta["sample"])
        step.bad_rows = to_host(self._bad_rows[: base + room])
        self._sample(step, self._decoder.logits[: len(sampled)], wanted, meta)
        self._prompt_logprobs(step)

    def _row(self, chunk: Chunk, sampled: int, first: int) -> _Row:
        slot = chunk.slot
        position = int(self._slots.lengths[slot])
        if chunk.sample:
            self._slots.lengths[slot] += 1
        return _Row(chunk, int(self._generation[slot]), sampled, position, first)

    # Sampling

    def _plan_sampling(self, step: CudaStep, slots: np.ndarray, sample: list[bool], arrays: dict[str, np.ndarray]):
        """What the sampled rows need beyond the greedy choice; None if nothing. Adds the draws' parameters to `arrays`."""
        if not len(slots):
            return None
        state = self._sampling
        wanted = np.array(sample)
        greedy_only = state.greedy[slots] | ~wanted
        special = (state.penalized | state.biased | state.reported)[slots] | (state.min_tokens[slots] > 0)
        grammar = np.fromiter((self._grammars.follows(s) for s in slots.tolist()), bool, len(slots))
        special = (special | grammar) & wanted
        if greedy_only.all() and not special.any():
            return None
        if ((state.penalized[slots] | grammar) & wanted).any():
            while self._flight:
                self.finish_oldest()  # their ids are this step's history
        lengths = [int(self._slots.lengths[s]) - (1 if w else 0) for s, w in zip(slots.tolist(), sample, strict=True)]
        history = [self._slots.history(s, n) for s, n in zip(slots.tolist(), lengths, strict=True)]
        masks, failed = self._grammars.masks({int(slots[i]): i for i in np.flatnonzero(grammar & wanted).tolist()})
        self._broken.update(failed)
        rows = Rows(slots, history, self._slots.prompt_lengths[slots], masks)
        drawn = np.flatnonzero(~greedy_only)
        if len(drawn):
            u = uniforms(state.seed[slots[drawn]], rows.indices[drawn])
            arrays["drawn"] = drawn.astype(np.int32)
            arrays["params"] = draw_parameters(drawn, slots, u, state)
        altered = altered_rows(rows, state)
        return rows, altered[wanted[altered]], np.flatnonzero(state.reported[slots] & wanted)

    def _sample(self, step: CudaStep, logits: torch.Tensor, wanted, meta: Packed) -> None:
        """Launch what `_plan_sampling` found and send the ids to the host."""
        out, decoder, count = self._out, self._decoder, len(logits)
        if wanted is not None:
            rows, altered, reported = wanted
            sample_slots = meta["sample"][:count]
            raw = None
            if len(reported):
                at = torch.from_numpy(reported).to(self._device, non_blocking=True)
                raw = logits.index_select(0, at)
            if len(altered):
                alter(logits, altered, rows, self._sampling)
                greedy(logits, out[0, :count], out[2, :count], decoder.last_ids, sample_slots, masked=True)
                step.lost = to_host(out[2, :count])
            if "drawn" in meta:
                draw(
                    logits,
                    out[0],
                    decoder.last_ids,
                    sample_slots,
                    meta["drawn"],
                    meta["params"].view(torch.float32).view(-1, 5),
                )
            if raw is not None:
                counts = [self._sampling.rules[s].logprobs or 0 for s in rows.slots[reported].tolist()]
                step.reported = (reported.tolist(), logprobs(raw, out[0].index_select(0, at), counts))
        if count:
            ring = self._ring[self._next_ring]
            self._next_ring = (self._next_ring + 1) % len(self._ring)
            ring[:2].copy_(out[:2], non_blocking=True)
            step.host = ring.numpy()

    def _prompt_logprobs(self, step: CudaStep) -> None:
        """Launch log-probabilities of the prompt tokens that follow each position computed, where a request wants them."""
        for row in step.rows:
            chunk = row.chunk
            wanted = self._sampling.rules[chunk.slot].prompt_logprobs
            count = min(chunk.start + chunk.length, int(self._slots.prompt_lengths[chunk.slot]) - 1) - chunk.start
            if wanted is None or count < 1:
                continue
            first = row.first
            for at in range(0, count, _LOGIT_ROWS):
                n = min(_LOGIT_ROWS, count - at)
                begin = chunk.start + at + 1
                targets = torch.from_numpy(self._slots.tokens[chunk.slot, begin : begin + n].astype(np.int64))
                hidden = self._decoder.x[first + at : first + at + n]
                out = torch.empty(n, self._vocab, dtype=torch.float32, device=self._device)
                logits = self._decoder.head(hidden, out=out)
                row.prompt.append(logprobs(logits, targets.to(self._device), [wanted] * n))
                if self._watch is not None:
                    self._watch(chunk.slot, chunk.start + at, logits)

    # Results

    def _finish(self, step: CudaStep, compute_s: float) -> None:
        """The device is done with a step: read its ids, tell slots and grammars, and make the result."""
        if step.bad_rows is not None:
            bad = step.bad_rows.numpy()
            for row in step.rows:
                if bad[row.first : row.first + row.chunk.length].any():
                    self._fail(row, NOT_FINITE)
        if step.reported is not None:
            of_row = dict(zip(step.reported[0], step.reported[1].read(), strict=True))
            for row in step.rows:
                if row.sampled in of_row:
                    row.logprobs = (of_row[row.sampled],)
        ids, bad_logits = (step.host[0], step.host[1]) if step.host is not None else (None, None)
        lost = None if step.lost is None else step.lost.numpy()
        results = []
        for row in step.rows:
            chunk, token = row.chunk, None
            current = row.generation == self._generation[chunk.slot]
            if chunk.sample:
                token = int(ids[row.sampled])
                if bad_logits[row.sampled]:
                    self._fail(row, NOT_FINITE)
                elif lost is not None and lost[row.sampled]:
                    self._fail(row, NOTHING_ALLOWED)
                if current:
                    if self._broken.get(chunk.slot) is None and (error := self._grammars.advance(chunk.slot, token)):
                        self._fail(row, error)
                    self._slots.tokens[chunk.slot, row.position] = token
            error = row.error or (self._broken.get(chunk.slot) if current else None)
            if error is not None:
                results.append(RowResult(chunk.slot, error=error))
                continue
            prompt = tuple(entry for part in row.prompt for entry in part.read())
            results.append(RowResult(chunk.slot, () if token is None else (token,), row.logprobs, prompt))
        step.set(StepResult(step.plan.step_id, tuple(results), compute_s, time.perf_counter() - step.begin))

    def _fail(self, row: _Row, error: str) -> None:
        """A failed sequence stays failed until its slot is used anew; a step issued meanwhile still computes it."""
        row.error = row.error or error
        if row.generation == self._generation[row.chunk.slot]:
            self._broken.setdefault(row.chunk.slot, error)
