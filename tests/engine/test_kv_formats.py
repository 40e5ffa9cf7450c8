"""Coded keys and values: round trips, bytes, and what every query sees, against a model that keeps whole sequences."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from headrace.base.errors import InvalidInput
from headrace.control.request import Sampling
from headrace.control.step import BlockAppend, Chunk, SlotInit
from headrace.engine.attention import ATTENTION
from headrace.engine.attention._contract import AttentionKind
from headrace.engine.backend import Limits
from headrace.engine.batch import Slots
from headrace.engine.kv_formats import make_pool, names
from headrace.engine.kv_formats.fp8 import FP8
from headrace.engine.kv_formats.int4 import GROUP, dequantized, quantized
from headrace.spec.accounting import cache_layout, default_block_tokens, kv_bytes_per_token, kv_staging_bytes
from headrace.spec.cache import CacheGroup, CacheLayout
from headrace.spec.hf import spec_from_hf
from headrace.spec.precision import kv_precision

CPU = torch.device("cpu")
CODED = ("fp8", "int8", "int4")
TOLERANCE = 2e-5
KINDS = {
    "gqa": AttentionKind(6, 2, 16, 0.3),
    "mha": AttentionKind(2, 2, 16, 0.25),
    "sliding": AttentionKind(4, 2, 16, 0.25, window=41),
    "narrow": AttentionKind(4, 2, 16, 0.25, window=9),
    "everything": AttentionKind(6, 2, 16, 0.3, window=50, softcap=2.0, sinks=torch.linspace(-1, 1, 6)),
}


# ------------------------------------------------------------------------------ the formulas, in numpy, one by one


def coded_in_4_bits(x: np.ndarray, shared: int) -> np.ndarray:
    """x as it is read back: minimum and step in fp16 along `shared`, 15 steps."""
    least = x.min(shared, keepdims=True).astype(np.float16).astype(np.float32)
    step = (np.maximum(x.max(shared, keepdims=True) - least, 0) / 15).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint((x - least) / np.where(step == 0, 1, step)), 0, 15)
    return codes * step + least


def coded_in_8_bits(x: np.ndarray) -> np.ndarray:
    step = (np.abs(x).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    return np.clip(np.rint(x / np.where(step == 0, 1, step)), -127, 127) * step


def e4m3(code: int) -> float:
    """The value of an E4M3 byte: bias 7, no infinities, NaN with all other bits set."""
    sign, exponent, mantissa = (-1) ** (code >> 7), code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array(sorted(v for code in range(256) if not np.isnan(v := e4m3(code))), np.float32)


def coded_as_fp8(x: np.ndarray) -> np.ndarray:
    """The nearest representable value, of two equally near the one with the even code."""
    x = np.clip(x, -448, 448)
    above = np.clip(np.searchsorted(E4M3, x), 1, len(E4M3) - 1)
    low, high = E4M3[above - 1], E4M3[above]
    middle = (low.astype(np.float64) + high) / 2
    even = torch.from_numpy(low).to(FP8).view(torch.uint8).numpy() % 2 == 0
    return np.where((x < middle) | ((x == middle) & even), low, high)


STORED = {
    "fp8": coded_as_fp8,
    "int8": coded_in_8_bits,
    "int4": lambda x: coded_in_4_bits(x, -1),
}
"""What is read back of vectors [..., dim] that are coded token by token: keys and values, for int4 values alone."""


def test_every_fp8_code_is_what_the_format_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(codes.view(FP8).float().numpy(), np.array([e4m3(c) for c in range(256)], np.float32))


def test_fp8_saturates_and_keeps_nan() -> None:
    pool, layer = pool_of("fp8")
    kv = torch.tensor([[1e6, -1e6, 448.0, 0.1, float("nan")] + [0.0] * 59])
    layer.write(torch.tensor([3]), kv)
    assert kv[0, :4].tolist() == [448.0, -448.0, 448.0, 0.1015625]
    assert torch.isnan(kv[0, 4])
    pool.discard([0])
    assert layer.read(torch.tensor([3]))[0].flatten()[:5].tolist() == [448.0, -448.0, 448.0, 0.1015625, 0.0]


@pytest.mark.parametrize("spread", [1e-7, 1e-3, 1.0, 300.0])
def test_nothing_is_off_by_more_than_half_a_step(spread: float) -> None:
    """Half of the largest step; fp16 scales add a relative 2^-11, and below its range an absolute 2^-24 per level."""
    source = np.random.default_rng(0)
    x = (source.normal(0, spread, (50, GROUP, 3, 16)) + source.normal(0, 10 * spread, (1, 1, 3, 16))).astype(np.float32)
    for shared in (1, -1):
        codes, scales = quantized(torch.from_numpy(x), shared)
        assert codes.dtype == torch.uint8
        assert codes.shape == (50, GROUP, 3, 8)
        found = dequantized(codes, scales, shared, torch.float32).numpy()
        np.testing.assert_array_equal(found, coded_in_4_bits(x, shared))
        step = (x.max(shared, keepdims=True) - x.min(shared, keepdims=True)) / 15
        assert (np.abs(found - x) <= step / 2 * 1.02 + np.abs(x).max() * 2**-10 + 16 * 2**-24).all()
    eight = coded_in_8_bits(x)
    assert (np.abs(eight - x) <= np.abs(x).max(-1, keepdims=True) / 254 * 1.02 + 128 * 2**-24).all()


def test_keys_by_channel_survive_an_outlier_channel_that_keys_by_token_do_not() -> None:
    """Why the keys are coded by channel: one channel of a large mean takes the whole range of a token's vector."""
    source = np.random.default_rng(1)
    x = source.normal(0, 1, (20, GROUP, 1, 64)).astype(np.float32)
    x[..., 7] += 40
    by_channel, by_token = (np.abs(coded_in_4_bits(x, shared) - x).mean() for shared in (1, -1))
    assert by_channel * 4 < by_token


def test_constant_vectors_are_exact() -> None:
    for value in (0.0, 1.0, -3.5):
        x = torch.full((2, GROUP, 1, 8), value)
        for shared in (1, -1):
            assert (dequantized(*quantized(x, shared), shared, torch.float32) == value).all()


# ------------------------------------------------------------------------------------------------ bytes and options

LLAMA = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("blocks_of", [1, 2])
def test_bytes_are_those_of_the_accounting(name: str, head_dim: int, blocks_of: int) -> None:
    spec = spec_from_hf(LLAMA | {"head_dim": head_dim})
    layout = cache_layout(spec, name, blocks_of * default_block_tokens(name))
    pool = make_pool(layout, Limits(7, 5, 256, 512), torch.float32, CPU, 3)
    assert pool.nbytes == 7 * layout.bytes_per_block
    assert layout.bytes_per_block == layout.block_tokens * kv_bytes_per_token(spec, name)
    assert pool.staging_bytes == kv_staging_bytes(spec, name, 5, "fp32")
    assert (pool.staging_bytes > 0) == layout.whole_blocks == (name == "int4")


def test_blocks_that_cut_a_group_are_refused() -> None:
    spec = spec_from_hf(LLAMA)
    with pytest.raises(InvalidInput, match="block_tokens") as caught:
        make_pool(cache_layout(spec, "int4", 16), Limits(7, 5, 256, 512), torch.float32, CPU, 3)
    assert caught.value.field == "block_tokens"


# ---------------------------------------------------------------------------------------- what every query sees


def layout_of(name: str, kind: AttentionKind, layers: int, block_tokens: int) -> CacheLayout:
    token_bytes = kind.num_kv_heads * kv_precision(name).token_bytes(kind.head_dim, kind.head_dim)
    return CacheLayout(
        groups=(CacheGroup(tuple(range(layers)), kind.window),),
        layers_per_group=layers,
        block_tokens=block_tokens,
        num_kv_heads=kind.num_kv_heads,
        head_dim=kind.head_dim,
        value_dim=kind.head_dim,
        kv_precision=name,
        bytes_per_block=layers * block_tokens * token_bytes,
        whole_blocks=kv_precision(name).key_group > 0,
    )


def pool_of(name: str):
    """A pool of one layer and its cache."""
    layout = layout_of(name, KINDS["mha"], 1, 32)
    pool = make_pool(layout, Limits(4, 2, 64, 64), torch.float32, CPU, 1)
    return pool, pool.layer(0, 0, 0)


@dataclass
class Sequence:
    """`keys`, `values` [layers][position]: what the model of the cache says is there; `end`: where the last chunk ended."""

    slot: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    end: int = 0
    keys: list[list[np.ndarray]] = field(default_factory=list)
    values: list[list[np.ndarray]] = field(default_factory=list)


class Rig:
    """A pool driven as an executor drives it, beside a model that keeps every sequence's keys and values whole."""

    LAYERS, SLOTS, BLOCKS, LONGEST = 2, 4, 60, 200

    def __init__(self, name: str, kind: AttentionKind, attention, seed: int, block_tokens: int = 32) -> None:
        self.name, self.kind, self.attention = name, kind, attention
        self.size = block_tokens
        self.layout = layout_of(name, kind, self.LAYERS, block_tokens)
        limits = Limits(self.BLOCKS, self.SLOTS, self.LONGEST, 1000)
        self.pool = make_pool(self.layout, limits, torch.float32, CPU, self.LAYERS)
        self.layers = [self.pool.layer(i, i, 0) for i in range(self.LAYERS)]
        self.slots = Slots(self.layout, self.SLOTS, self.LONGEST)
        self.source = np.random.default_rng(seed)
        self.rng = random.Random(seed)
        self.free_slots, self.free = list(range(self.SLOTS)), list(range(self.BLOCKS))
        self.holders = [0] * self.BLOCKS
        self.live: list[Sequence] = []

    def add(self) -> Sequence:
        sequence = Sequence(self.free_slots.pop(self.rng.randrange(len(self.free_slots))))
        sequence.keys, sequence.values = ([[] for _ in range(self.LAYERS)] for _ in range(2))
        self.slots.init(SlotInit(sequence.slot, "", (0,) * self.LONGEST, self.LONGEST, Sampling(max_tokens=1)))
        self.live.append(sequence)
        return sequence

    def copy_of(self, other: Sequence, tokens: int) -> Sequence:
        """A new sequence that shares the whole blocks of the first `tokens` and copies the rest of them."""
        sequence = self.add()
        whole = tokens // self.size
        for block in other.blocks[:whole]:
            sequence.blocks.append(block)
            self.holders[block] += 1
        if tokens % self.size:
            fresh = self.take()
            self.pool.copy([other.blocks[whole]], [fresh])
            sequence.blocks.append(fresh)
        self.append(sequence, 0)
        sequence.computed = sequence.end = tokens
        begun = tokens // GROUP * GROUP
        for i in range(self.LAYERS):
            sequence.keys[i], sequence.values[i] = other.keys[i][:tokens], other.values[i][:tokens]
            if self.name == "int4" and tokens % GROUP:
                sequence.keys[i][begun:] = list(self.group(other, i, begun // GROUP)[: tokens - begun])
        return sequence

    def group(self, s: Sequence, layer: int, index: int) -> np.ndarray:
        """Keys of a group as the pool codes them now, which may know only some of its tokens."""
        return coded_in_4_bits(np.array(s.keys[layer][index * GROUP : (index + 1) * GROUP]), 0)

    def take(self) -> int:
        block = self.free.pop(self.rng.randrange(len(self.free)))
        self.holders[block] = 1
        return block

    def append(self, sequence: Sequence, first: int) -> None:
        if len(sequence.blocks) > first:
            self.slots.append(BlockAppend(sequence.slot, 0, first, tuple(sequence.blocks[first:])))

    def remove(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        self.free_slots.append(sequence.slot)
        for block in sequence.blocks:
            self.drop(block)

    def drop(self, block: int) -> None:
        if block >= 0:
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free.append(block)

    def take_back(self, sequence: Sequence, tokens: int) -> None:
        """The last `tokens` were drafts that are refused; others will be written in their place."""
        sequence.computed -= tokens

    def forget_behind(self, sequence: Sequence) -> None:
        """Give away the blocks that no query will see again."""
        if self.kind.window is not None:
            for j in range(max(0, sequence.computed - self.kind.window + 1) // self.size):
                self.drop(sequence.blocks[j])
                sequence.blocks[j] = -1

    def step(self, work: list[tuple[Sequence, int]], poison: dict[int, int] | None = None) -> list[torch.Tensor]:
        """Compute so many further tokens of each and compare what they attend to; outputs of each layer.

        `poison`: a slot's row of this chunk whose key and value are not numbers; the sequence is not compared then.
        """
        for sequence, count in work:
            begun = len(sequence.blocks)
            while len(sequence.blocks) * self.size < sequence.computed + count:
                sequence.blocks.append(self.take())
            self.append(sequence, begun)
        batch = self.slots.batch([Chunk(s.slot, s.computed, count, False) for s, count in work])
        if len(batch.tail_slots):
            self.pool.zero(batch.tail_slots)
        self.pool.begin(batch)
        outputs = []
        for i, layer in enumerate(self.layers):
            outputs.append(self._layer(i, layer, batch, work, poison or {}))
        for sequence, count in work:
            sequence.computed += count
            sequence.end = sequence.computed
        return outputs

    def _layer(self, i: int, layer, batch, work, poison) -> torch.Tensor:
        kind, rows = self.kind, len(batch.positions)
        every = kind.num_heads + 2 * kind.num_kv_heads
        data = self.source.normal(0, 1, (rows, every, kind.head_dim)).astype(np.float32)
        data[:, kind.num_heads :, 3] += 5  # an outlier channel
        for slot, row in poison.items():
            (at,) = (first for first, (s, _) in zip(batch.first_rows, work, strict=True) if s.slot == slot)
            data[at + row, kind.num_heads :] = np.nan
        flat = torch.from_numpy(data.copy()).view(rows, -1)
        q, k, v = flat.view(rows, every, -1).split((kind.num_heads, kind.num_kv_heads, kind.num_kv_heads), 1)
        layer.write(torch.from_numpy(batch.write_slots[0]), flat[:, kind.num_heads * kind.head_dim :])
        prepared = self.attention.prepare(batch.spans(0), kind, CPU, torch.float32, self.pool.dtype)
        out = self.attention.attend(q, k, v, layer, prepared)
        for (s, count), first in zip(work, batch.first_rows.tolist(), strict=True):
            new = data[first : first + count]
            self._remember(s, i, new)
            if s.slot in poison:
                continue
            np.testing.assert_allclose(v[first : first + count].numpy(), np.array(s.values[i][s.computed :]), atol=1e-6)
            np.testing.assert_allclose(
                out[first : first + count].numpy(), self._attended(s, i, new[:, : kind.num_heads]), atol=TOLERANCE
            )
        return out

    def _remember(self, s: Sequence, i: int, new: np.ndarray) -> None:
        heads, kv_heads = self.kind.num_heads, self.kind.num_kv_heads
        keys, values = new[:, heads : heads + kv_heads], new[:, heads + kv_heads :]
        start = s.computed
        index = start // GROUP
        if self.name == "int4" and start % GROUP and (s.end - 1) // GROUP != index:
            # Taken back beyond a group's end: what was computed is gone, its codes are left.
            s.keys[i][index * GROUP : start] = list(self.group(s, i, index)[: start - index * GROUP])
        stored = STORED[self.name]
        s.keys[i][start:] = list(keys if self.name == "int4" else stored(keys))
        s.values[i][start:] = list(stored(values))

    def _attended(self, s: Sequence, i: int, q: np.ndarray) -> np.ndarray:
        """Outputs of queries at positions s.computed, …: the softmax of what each sees, in double precision."""
        kind, group = self.kind, self.kind.num_heads // self.kind.num_kv_heads
        own, values = np.array(s.keys[i], np.float64), np.array(s.values[i], np.float64)
        stored = own.copy()
        if self.name == "int4":
            for index in range(len(own) // GROUP):
                stored[index * GROUP : (index + 1) * GROUP] = self.group(s, i, index)
        out = np.empty((len(q), kind.num_heads, kind.head_dim))
        for row, query in enumerate(q.astype(np.float64)):
            end = s.computed + row + 1
            oldest = 0 if kind.window is None else max(0, end - kind.window)
            begun = max(oldest, (end - 1) // GROUP * GROUP)
            keys = np.concatenate([stored[oldest:begun], own[begun:end]]).repeat(group, 1)
            scores = np.einsum("hd,khd->hk", query, keys) * kind.scale
            if kind.softcap is not None:
                scores = kind.softcap * np.tanh(scores / kind.softcap)
            top = scores.max(1, keepdims=True)
            exponents = np.exp(scores - top)
            total = exponents.sum(1, keepdims=True)
            if kind.sinks is not None:
                total += np.exp(kind.sinks.numpy().astype(np.float64)[:, None] - top)
            out[row] = np.einsum("hk,khd->hd", exponents / total, values[oldest:end].repeat(group, 1))
        return out.reshape(len(q), -1)


def attentions(name: str) -> list[str]:
    return ["grouped"] if name == "int4" else ["naive", "sdpa"]


def attention_of(name: str):
    from headrace.engine.attention._grouped import GROUPED

    return GROUPED if name == "grouped" else ATTENTION.get(name)


EVERY = [(name, attention) for name in CODED for attention in attentions(name)]


@pytest.mark.parametrize("block_tokens", [32, 64])
@pytest.mark.parametrize("kind", KINDS, ids=list(KINDS))
@pytest.mark.parametrize(("name", "attention"), EVERY)
def test_random_work_is_seen_as_the_formulas_say(
    name: str, attention: str, kind: str, block_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences come, are computed in chunks, copied from, taken back in part, and go; slots and blocks change hands."""
    monkeypatch.setattr("headrace.engine.attention._grouped._CALL_ELEMENTS", 8_000)  # some decode calls are cut
    rig = Rig(
        name, KINDS[kind], attention_of(attention), seed=len(name) + len(kind) + block_tokens, block_tokens=block_tokens
    )
    rng = rig.rng
    for _ in range(20):
        move = rng.random()
        if move < 0.25 and rig.live:
            rig.remove(rng.choice(rig.live))
        elif move < 0.45 and rig.live and rig.free_slots and KINDS[kind].window is None:
            other = rng.choice(rig.live)
            if other.computed:
                rig.copy_of(other, rng.randint(1, other.computed))
        elif move < 0.6 and rig.live:
            sequence = rng.choice(rig.live)
            # What is taken back must lie in blocks of its own, and no block behind a window may be needed again.
            most = min(4, sequence.computed - 1) if KINDS[kind].window is None else 0
            if most > 0 and all(rig.holders[b] == 1 for b in sequence.blocks[(sequence.computed - most) // rig.size :]):
                rig.take_back(sequence, rng.randint(1, most))
        if rig.free_slots and rng.random() < 0.6:
            rig.add()
        work = []
        for sequence in rig.live:
            count = min(rng.choice((1, 1, 1, 2, 5, 31, 32, 33, 70)), rig.LONGEST - sequence.computed)
            if count and rng.random() < 0.8:
                work.append((sequence, count))
        if work:
            rng.shuffle(work)
            rig.step(work)
        for sequence in rig.live:
            rig.forget_behind(sequence)


@pytest.mark.parametrize(("name", "attention"), EVERY)
def test_chunks_and_batch_mates_change_nothing(name: str, attention: str) -> None:
    """The same tokens, once whole and alone, once in pieces among others: outputs agree to rounding."""
    found = []
    for pieces in ([130], [1, 30, 1, 1, 40, 20, 32, 5]):
        rig = Rig(name, KINDS["gqa"], attention_of(attention), seed=0)
        fixed = np.random.default_rng(9).normal(0, 1, (130, 10, 16)).astype(np.float32)
        sequence, rows, at = rig.add(), [], 0
        stranger = rig.add() if len(pieces) > 1 else None
        for piece in pieces:
            rig.source = _Fixed(fixed[at : at + piece], stranger is not None)
            work = [(sequence, piece), *([(stranger, 3)] if stranger is not None else [])]
            rows.append(rig.step(work)[0][:piece])
            at += piece
        found.append(torch.cat(rows))
    torch.testing.assert_close(found[0], found[1], atol=TOLERANCE, rtol=0)


class _Fixed:
    """A source of given rows, then random ones for the stranger."""

    def __init__(self, rows: np.ndarray, more: bool) -> None:
        self._rows = rows
        self._other = np.random.default_rng(1)

    def normal(self, mean: float, spread: float, shape: tuple[int, ...]) -> np.ndarray:
        rest = self._other.normal(mean, spread, (shape[0] - len(self._rows), *shape[1:]))
        return np.concatenate([self._rows, rest]).astype(np.float32)


@pytest.mark.parametrize(("name", "attention"), EVERY)
def test_a_token_that_is_no_number_harms_neither_neighbours_nor_heirs(name: str, attention: str) -> None:
    rig = Rig(name, KINDS["gqa"], attention_of(attention), seed=4)
    good, bad = rig.add(), rig.add()
    rig.step([(good, 20), (bad, 20)])
    outputs = rig.step([(good, 30), (bad, 5)], poison={bad.slot: 2})
    assert torch.isnan(outputs[0][30 + 2 :]).any()
    rig.pool.discard(sorted({*bad.blocks}))
    for tensor in rig.pool.fields.values():
        values = tensor.view(FP8).float() if name == "fp8" else tensor.float()
        assert torch.isfinite(values).all()
    # What was good of its first block may be in the prefix cache: a copy of it must be of use.
    for i in range(rig.LAYERS):
        bad.keys[i], bad.values[i] = bad.keys[i][:20], bad.values[i][:20]
        if name == "int4":
            known = np.array([*bad.keys[i], *[np.zeros((2, 16), np.float32)]])
            coded = rig.layers[i].gather(torch.tensor(bad.blocks), 1, torch.float32)[0][0].transpose(0, 1)[:20].numpy()
            spread = known.max(0) - known.min(0)
            assert (np.abs(coded - known[:20]) <= spread).all()
    heirs = [*bad.blocks]
    rig.remove(bad)
    rig.free = [b for b in rig.free if b not in heirs] + heirs
    rig.rng.randrange = lambda n: n - 1  # take exactly these blocks, and the same slot
    heir = rig.add()
    assert heir.slot == bad.slot
    rig.step([(good, 1), (heir, 40)])
    assert heir.blocks[0] in heirs
    rig.step([(good, 1), (heir, 1)])
