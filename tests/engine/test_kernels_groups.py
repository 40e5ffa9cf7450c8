"""Kernels over keys and values of 4 bits beside the torch backend's pool, which gets the same vectors: codes, scales and staged keys
are the same to the bit, whatever the chunks, and every query sees the same."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from kernel_device import DEVICE, DTYPES, ON_GPU, gap, randn

from headrace.base.errors import InvalidInput
from headrace.control.request import Sampling
from headrace.control.step import BlockAppend, BlockCopy, Chunk, SlotInit, StepPlan
from headrace.engine.attention._contract import AttentionKind
from headrace.engine.attention._grouped import GROUPED
from headrace.engine.backend import Limits
from headrace.engine.batch import Slots
from headrace.engine.cuda.pool import KVPool
from headrace.engine.cuda.staged import StagedKeys
from headrace.engine.kernels.blocks import copy_blocks
from headrace.engine.kernels.decode import DecodeWorkspace, decode_attention
from headrace.engine.kernels.groups import code_groups, stage_keys
from headrace.engine.kernels.prefill_groups import prefill_groups
from headrace.engine.kernels.rope import rope_cache
from headrace.engine.kv_formats import make_pool
from headrace.engine.kv_formats.int4 import GROUP, dequantized, quantized
from headrace.spec.cache import CacheGroup, CacheLayout
from headrace.spec.precision import kv_precision

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
KINDS = {
    "gqa": (AttentionKind(4, 2, 16, 0.3), 32),
    "two groups a block": (AttentionKind(2, 1, 24, 0.25), 64),
    "everything": (AttentionKind(3, 1, 16, 0.3, window=41, softcap=2.0, sinks=torch.linspace(-1, 1, 3)), 32),
    "narrow": (AttentionKind(2, 2, 80, 0.1, window=9), 32),
}


def layout_of(kind: AttentionKind, block_tokens: int) -> CacheLayout:
    token = kind.num_kv_heads * kv_precision("int4").token_bytes(kind.head_dim, kind.head_dim)
    return CacheLayout(
        (CacheGroup((0,), kind.window),), 1, block_tokens, kind.num_kv_heads, kind.head_dim, kind.head_dim, "int4",
        block_tokens * token, whole_blocks=True,
    )  # fmt: skip


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@dataclass
class Sequence:
    slot: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class Beside:
    """One layer in two pools that get the same plans, the torch backend's and that of the kernels."""

    SLOTS, BLOCKS, LONGEST = 5, 24, 200

    def __init__(self, kind: AttentionKind, block_tokens: int, dtype: torch.dtype, seed: int = 0) -> None:
        self.kind, self.dtype, self.seed = kind, dtype, seed
        self.layout = layout = layout_of(kind, block_tokens)
        limits = Limits(self.BLOCKS, self.SLOTS, self.LONGEST, 1000)
        self.theirs = make_pool(layout, limits, dtype, CPU, 1)
        self.layer = self.theirs.layer(0, 0, 0)
        self.pool = KVPool(layout, self.BLOCKS, DEVICE)
        assert self.pool.nbytes == layout.bytes_per_block * self.BLOCKS == self.theirs.nbytes
        self.pool.blocks.zero_()
        self.staged = StagedKeys(layout, limits, 1, dtype, DEVICE)
        assert self.staged.nbytes == self.theirs.staging_bytes
        # What was never staged may be anything.
        self.staged.layers.fill_(float("nan"))
        self.slots = Slots(layout, self.SLOTS, self.LONGEST)
        heads = kind.num_heads
        self.work = DecodeWorkspace(
            self.SLOTS, kind.num_kv_heads, heads // kind.num_kv_heads, kind.head_dim, lambda n: 8, DEVICE
        )
        self.rng = random.Random(seed)
        self.free, self.free_slots = list(range(self.BLOCKS)), list(range(self.SLOTS))
        self.rng.shuffle(self.free)
        self.steps = 0

    def add(self, blocks=(), computed: int = 0) -> Sequence:
        sequence = Sequence(self.free_slots.pop(0), list(blocks), computed)
        self.slots.init(SlotInit(sequence.slot, "", (0,) * self.LONGEST, self.LONGEST, Sampling(max_tokens=1)))
        if blocks:
            self.slots.append(BlockAppend(sequence.slot, 0, 0, tuple(blocks)))
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self.free_slots.append(sequence.slot)
        self.free.extend(sequence.blocks)

    def step(self, work: list[tuple[Sequence, int]], copies=(), shared=None) -> None:
        """Compute so many further tokens of each; both pools, and what queries see, must agree. `shared`: (tokens, tiles) of
        decode rows' common prefix."""
        work = sorted(work, key=lambda w: w[1] > 1)
        for sequence, count in work:
            needed = -(-(sequence.computed + count) // self.layout.block_tokens)
            if needed > len(sequence.blocks):
                fresh = [self.free.pop() for _ in range(needed - len(sequence.blocks))]
                self.slots.append(BlockAppend(sequence.slot, 0, len(sequence.blocks), tuple(fresh)))
                sequence.blocks += fresh
        chunks = tuple(Chunk(s.slot, s.computed, n, False) for s, n in work)
        if copies:
            self.theirs.copy([c.source for c in copies], [c.target for c in copies])
        batch = self.slots.batch(chunks)
        kind, kv_heads, dim = self.kind, self.kind.num_kv_heads, self.kind.head_dim
        tokens = len(batch.positions)
        self.steps += 1
        # Channels of different sizes, as keys have them.
        sizes = torch.linspace(0.1, 4, dim)
        q = randn(tokens, kind.num_heads * dim, dtype=self.dtype, seed=self.seed + 3 * self.steps).cpu()
        k = (randn(tokens, kv_heads, dim, dtype=torch.float32, seed=self.seed + 3 * self.steps + 1).cpu() + 1) * sizes
        v = randn(tokens, kv_heads * dim, dtype=self.dtype, seed=self.seed + 3 * self.steps + 2).cpu()
        k = k.to(self.dtype).flatten(1)

        self.theirs.begin(batch)
        self.layer.write(torch.from_numpy(batch.write_slots[0]), torch.cat([k, v], 1))
        prepared = GROUPED.prepare(batch.spans(0), kind, CPU, torch.float32)
        wanted = GROUPED.attend(q.float().view(tokens, -1, dim), k, v, self.layer, prepared)

        plan = StepPlan(self.steps, copies=tuple(copies), chunks=chunks)
        qkv = torch.cat([q, k, v], 1).to(DEVICE)
        found = self.attended(qkv, plan, batch, shared)
        assert gap(found, wanted) < TOLERANCE[self.dtype]
        for sequence, count in work:
            sequence.computed += count
        self.compare([s for s, _ in work])

    def attended(self, qkv, plan, batch, shared):
        kind, heads = self.kind, self.kind.num_heads
        kv, scales = self.pool.layer(0)
        if plan.copies:
            copy_blocks(self.pool.blocks, ints([(c.source, c.target) for c in plan.copies]))
        for groups in self.staged.plan(plan, self.slots.tables).values():
            self.staged.restage(self.pool, 0, torch.from_numpy(groups).to(DEVICE))
        staged, tables = self.staged.layers[0], torch.from_numpy(self.slots.tables[0]).to(DEVICE)
        lengths = batch.lengths
        slots, positions = ints(np.repeat(batch.slots, lengths).tolist()), ints(batch.positions.tolist())
        # Padding, before and behind.
        n = int((lengths == 1).sum())
        qkv = torch.cat([qkv[:n], qkv[:1], qkv[n:], qkv[:1]])
        slots = torch.cat([slots[:n], ints([-1]), slots[n:], ints([-1])])
        positions = torch.cat([positions[:n], ints([0]), positions[n:], ints([0])])
        turn = torch.zeros(self.LONGEST, 2, device=DEVICE)
        rope_cache(qkv, kv, tables, slots, positions, turn, heads, rope_dim=0, scales=scales)
        code_groups(qkv, kv, scales, staged, tables, slots, positions, heads)
        out = torch.full((len(qkv), heads * kind.head_dim), float("nan"), dtype=self.dtype, device=DEVICE)
        sinks = None if kind.sinks is None else kind.sinks.to(DEVICE)
        rules = {"scale": kind.scale, "window": kind.window, "softcap": kind.softcap, "sinks": sinks}
        given = {"splits": 3}
        if shared is not None:
            firsts = [shared[0]] * n + [0]
            given = {
                "splits": 2,
                "firsts": ints(firsts),
                "tiles": ints(shared[1]),
                "prefix_splits": 2,
                "prefix_chunk": 32,
            }
        decode_attention(
            qkv[: n + 1], out[: n + 1], kv, tables, slots[: n + 1], positions[: n + 1], self.work, heads, scales=scales,
            staged=staged, min_chunk=32, **rules, **given,
        )  # fmt: skip
        assert not out[n].any()
        longer = np.flatnonzero(lengths > 1)
        if len(longer):
            chunks = [(batch.slots[i], batch.starts[i], lengths[i], batch.first_rows[i] + 1) for i in longer]
            tiles = [(j, m) for j, i in enumerate(longer) for m in range(0, lengths[i], 16)]
            prefill_groups(
                qkv, out, kv, scales, staged, tables, ints(np.array(chunks).tolist()), ints(np.array(tiles).tolist()),
                heads, block_m=16, **rules,
            )  # fmt: skip
            stage_keys(qkv, staged, slots, positions, heads)
        return torch.cat([out[:n], out[n + 1 : -1]])

    def compare(self, sequences: list[Sequence]) -> None:
        heads, dim, tokens = self.layout.num_kv_heads, self.layout.head_dim, self.layout.block_tokens
        kv, scales = (t.cpu() for t in self.pool.layer(0))
        codes = kv.contiguous().view(torch.uint8).permute(0, 3, 1, 2, 4).flatten(2, 3)
        assert torch.equal(codes, self.theirs.fields["codes"][0])
        values = scales[:, : 2 * heads * tokens].reshape(-1, heads, tokens, 2).transpose(1, 2)
        assert torch.equal(values, self.theirs.fields["value_scales"][0])
        keys = scales[:, 2 * heads * tokens :].reshape(-1, tokens // GROUP, heads, dim, 2)
        assert torch.equal(keys, self.theirs.fields["key_scales"][0])
        for s in sequences:
            count = (s.computed - 1) % GROUP + 1
            ours = self.staged.layers[0, s.slot, :, :count].cpu().transpose(0, 1)
            assert torch.equal(ours, self.theirs._staged[0, s.slot, :count])


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else [torch.float32], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_any_schedule_leaves_the_torch_backend_s_bytes_and_sees_the_same(name, dtype):
    beside = Beside(*KINDS[name], dtype)
    first, second, third = beside.add(), beside.add(), beside.add()
    beside.step([(first, 31), (second, 1), (third, 3)])
    beside.step([(first, 1), (second, 40), (third, 29)])  # full to the token
    beside.step([(first, 1), (second, 25), (third, 1)])  # first tokens of groups; a chunk from group to group
    beside.step([(first, 1), (second, 1), (third, 1)])
    beside.step([(first, 63), (third, 5)])  # through a whole group
    beside.step([(first, 1), (second, 1), (third, 1)])
    beside.remove(second)
    again = beside.add()
    beside.step([(again, 2), (first, 1)])
    beside.step([(again, 1), (third, 1)])
    for _ in range(10 if ON_GPU else 0):
        live = [s for s in (first, third, again) if s.computed < 150]
        beside.step([(s, beside.rng.choice([1, 1, 2, 33])) for s in live])


def test_half_precision():
    beside = Beside(*KINDS["two groups a block"], torch.float16, seed=50)
    first, second = beside.add(), beside.add()
    beside.step([(first, 70), (second, 5)])
    beside.step([(first, 1), (second, 30)])
    beside.step([(first, 1), (second, 1)])


@pytest.mark.parametrize("name", ["gqa", "two groups a block"])
def test_whoever_goes_on_inside_a_copied_group_stages_what_its_codes_say(name):
    beside = Beside(*KINDS[name], torch.float32, seed=3)
    size = beside.layout.block_tokens
    first = beside.add()
    beside.step([(first, size + 11)])
    fresh = beside.free.pop()
    second = beside.add([first.blocks[0], fresh], size + 11)
    copies = (BlockCopy(first.blocks[1], fresh),)
    beside.step([(first, 1), (second, 1)], copies)
    beside.step([(first, 1), (second, 3)])
    # The same with a chunk that leaves the group.
    fresh = beside.free.pop()
    third = beside.add([first.blocks[0], fresh], size + 9)
    beside.step([(first, 1), (third, 30)], (BlockCopy(first.blocks[1], fresh),))
    beside.step([(second, 1), (third, 1)])


def test_shared_prefixes():
    kind, size = KINDS["gqa"]
    beside = Beside(kind, size, torch.float32, seed=9)
    first = beside.add()
    beside.step([(first, 2 * size + 5)])
    others = [beside.add(first.blocks[:2], 2 * size) for _ in range(3)]
    beside.step([(s, 2 + i) for i, s in enumerate(others)])
    shared = (2 * size, [[0, 2, 2 * size], [2, 4, 2 * size], [0, 0, 0]])
    beside.step([(s, 1) for s in (first, *others)], shared=shared)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [1e-7, 1e-3, 1.0, 300.0])
def test_codes_are_those_of_the_torch_backend(dtype, spread):
    """Of numbers of any size, and of keys that are none, which must not spoil their group."""
    heads, dim = 2, 24
    layout = layout_of(AttentionKind(2, heads, dim, 1.0), 32)
    pool, limits = KVPool(layout, 2, DEVICE), Limits(2, 1, 64, 64)
    staged = StagedKeys(layout, limits, 1, dtype, DEVICE).layers[0]
    kv, scales = pool.layer(0)
    k = (randn(GROUP, heads, dim, dtype=torch.float32, seed=1) * spread).to(dtype)
    v = (randn(GROUP, heads, dim, dtype=torch.float32, seed=2) * spread).to(dtype)
    k[3, 0, 5], k[4, 1, 7], k[5, 0, 0] = float("nan"), float("inf"), float("-inf")
    k[:, 1, 9], v[7] = 2.5, -1.0  # nothing to tell apart
    v[9, 1, 3] = float("nan")
    qkv = torch.cat([torch.zeros_like(k).flatten(1), k.flatten(1), v.flatten(1)], 1)
    tables, slots, positions = ints([[1, 0]]), ints([0] * GROUP), ints(list(range(GROUP)))
    turn = torch.zeros(64, 2, device=DEVICE)
    rope_cache(qkv, kv, tables, slots, positions, turn, 2, rope_dim=0, scales=scales)
    code_groups(qkv, kv, scales, staged, tables, slots, positions, 2)
    k, v = k.cpu(), v.cpu()
    bytes_ = kv[1].cpu().contiguous().view(torch.uint8)
    values, of_values = quantized(v.float(), -1)
    found = scales[1, : 2 * heads * GROUP].cpu().view(heads, GROUP, 2).transpose(0, 1)
    assert torch.isnan(found[9, 1]).all()
    well = torch.ones(GROUP, heads, dtype=torch.bool)
    well[9, 1] = False
    assert torch.equal(found[well], of_values[well])
    assert torch.equal(bytes_[1].transpose(0, 1)[well], values[well])
    codes, of_keys = quantized(k.float().nan_to_num(0.0).clamp(-65504, 65504), 0)
    assert torch.equal(bytes_[0].transpose(0, 1), codes)
    assert torch.equal(scales[1, 2 * heads * GROUP :].cpu().view(heads, dim, 2), of_keys)
    # A prompt sees its own values as they are stored, and keys as they were computed.
    seen = qkv.cpu().view(GROUP, -1, dim)[:, 2:]
    assert torch.equal(seen[:, :heads].nan_to_num(7.0), k.nan_to_num(7.0))
    stored = dequantized(values, of_values, -1, torch.float32).to(dtype)
    close = (seen[:, heads:][well].float() - stored[well].float()).abs().max()
    assert close <= 2 * torch.finfo(dtype).eps * stored[well].float().abs().max() + torch.finfo(dtype).smallest_normal
    assert torch.equal(staged[0].cpu().nan_to_num(7.0), k.transpose(0, 1).nan_to_num(7.0))


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 60.0])
def test_values_of_any_magnitude_survive_fp16(magnitude):
    beside = Beside(AttentionKind(2, 1, 16, 0.25), 32, torch.float16, seed=4)
    sequence = beside.add()
    beside.step([(sequence, 40)])
    _, scales = beside.pool.layer(0)
    for part in (scales[:, : 2 * GROUP], beside.theirs.fields["value_scales"]):
        part.mul_(magnitude)
    beside.step([(sequence, 1)])


def test_what_does_not_fit_is_refused():
    with pytest.raises(InvalidInput, match="block_tokens") as caught:
        KVPool(layout_of(AttentionKind(2, 1, 16, 1.0), 16), 4, DEVICE)
    assert caught.value.field == "block_tokens"
    with pytest.raises(InvalidInput, match="multiple of 8 on the GPU, not 20"):
        KVPool(layout_of(AttentionKind(2, 1, 20, 1.0), 32), 4, DEVICE)


def test_a_copy_ends_what_its_slot_had_staged_in_that_block():
    beside = Beside(*KINDS["gqa"], torch.float32, seed=6)
    first, other = beside.add(), beside.add()
    beside.step([(first, 42), (other, 43)])
    beside.free_slots.insert(0, other.slot)
    second = beside.add([first.blocks[0], other.blocks[1]], 42)
    assert second.slot == other.slot
    beside.step([(second, 1)], (BlockCopy(first.blocks[1], other.blocks[1]),))
