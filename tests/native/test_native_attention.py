"""A whole layer against float64 numpy: heads, windows, caps, sinks, cache types, mixed steps, long contexts; and what a
step must refuse."""

from __future__ import annotations

import random
from dataclasses import replace

import headrace_native
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_layer import KV, Native, Shape, reference, tables

KERNELS = headrace_native.kernels()
KINDS = {
    "gqa": Shape(),
    "mha": Shape(kv_heads=4),
    "mqa": Shape(kv_heads=1, heads=6),
    "wide": Shape(head_dim=64, heads=3, kv_heads=1, rope_dim=64),
    "odd-dim": Shape(head_dim=80, heads=2, kv_heads=2, rope_dim=32),
    "window": Shape(window=13),
    "window-over-segments": Shape(window=700),
    "softcap": Shape(softcap=1.5),
    "sinks": Shape(sinks=True),
    "norms-interleaved": Shape(qk_norm=True, interleaved=True),
    "blocks-of-32": Shape(block_tokens=32, blocks=40),
}
TOLERANCE = {"fp32": 2e-4, "fp16": 3e-3, "int8": 1e-2, "fp8": 1e-2, "int4": 1e-2, "bf16": 2e-2}


def mixed_schedule(native: Native, sequences, rng: random.Random) -> list[np.ndarray]:
    """Logits of every position of every sequence, computed in random chunks of random subsets."""
    table = tables(native.s, len(sequences), np.random.default_rng(0))
    done = [0] * len(sequences)
    found = [[] for _ in sequences]
    while any(at < len(s) for at, s in zip(done, sequences, strict=True)):
        open_ones = [i for i, s in enumerate(sequences) if done[i] < len(s)]
        chosen = rng.sample(open_ones, rng.randint(1, len(open_ones)))
        chunks = []
        for i in chosen:
            count = min(rng.choice((1, 1, 3, 16, 50, 300)), len(sequences[i]) - done[i])
            chunks.append((i, done[i], sequences[i][done[i] : done[i] + count]))
        logits = native.step(chunks, table)
        at = 0
        for i, start, tokens in chunks:
            found[i].append(logits[at : at + len(tokens)])
            at += len(tokens)
            done[i] = start + len(tokens)
    return [np.concatenate(parts) for parts in found]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("kind", KINDS)
def test_layer_equals_numpy(kind, kv, kernels):
    shape = replace(KINDS[kind], kv=kv)
    rng = np.random.default_rng(1)
    lengths = (1, 15, 33, 90) if kernels == "scalar" else (1, 15, 40, 161)
    sequences = [rng.integers(0, shape.vocab, n) for n in lengths]
    found = mixed_schedule(Native(shape, kernels), sequences, random.Random(kind))
    for tokens, ours in zip(sequences, found, strict=True):
        np.testing.assert_allclose(ours, reference(shape, tokens), atol=TOLERANCE[kv] * 5, rtol=TOLERANCE[kv])


@pytest.mark.parametrize("kernels", [k for k in KERNELS if k != "scalar"])
@pytest.mark.parametrize("kind", ["gqa", "window-over-segments", "sinks", "softcap"])
@pytest.mark.parametrize("kv", ["fp32", "int8", "bf16"])
def test_contexts_of_several_segments(kind, kv, kernels):
    shape = replace(KINDS[kind], kv=kv, blocks=150)
    tokens = np.random.default_rng(2).integers(0, shape.vocab, 1500)
    expected = reference(shape, tokens)
    (found,) = mixed_schedule(Native(shape, kernels), [tokens], random.Random(3))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE[kv] * 5, rtol=TOLERANCE[kv])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", ["gqa", "window-over-segments", "wide"])
@pytest.mark.parametrize("kv", KV)
def test_chunks_mates_and_threads_change_no_bit(kind, kv, kernels):
    shape = replace(KINDS[kind], kv=kv, blocks=240)
    rng = np.random.default_rng(4)
    most = 600 if kernels == "scalar" else 1100
    sequences = [rng.integers(0, shape.vocab, n) for n in (3, 70, most)]
    expected = []
    for i, tokens in enumerate(sequences):
        table = tables(shape, 1, np.random.default_rng(10 + i))
        expected.append(Native(shape, kernels, threads=1).step([(0, 0, tokens)], table))
    for threads in (1, 3):
        found = mixed_schedule(Native(shape, kernels, threads), sequences, random.Random(threads))
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kv", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "exact"), [("gqa", True), ("gqa", False), ("wide", False), ("window", False)])
def test_kernel_sets_agree_to_the_bit(kind, exact, kv):
    shape = replace(KINDS[kind], kv=kv)
    tokens = np.random.default_rng(5).integers(0, shape.vocab, 700)
    table = tables(shape, 1, np.random.default_rng(0))
    first, *others = (Native(shape, k, exact=exact).step([(0, 0, tokens)], table) for k in KERNELS)
    for other in others:
        np.testing.assert_array_equal(first, other)


# ------------------------------------------------------------------------------------------------------- refusals


class Call:
    """The arguments of a valid step of two sequences, to be damaged."""

    def __init__(self, native: Native):
        self.native = native
        self.tokens = np.array([1, 2, 3, 4], np.int32)
        self.row_start = np.array([0, 3, 4], np.int32)
        self.context = np.array([0, 20], np.int32)
        self.tables = np.arange(8, dtype=np.int32).reshape(1, 2, 4)
        cos, sin = native.s.angles([0, 1, 2, 20])
        self.cos, self.sin = [cos], [sin]
        self.outputs = np.array([2, 3], np.int32)
        self.broken = np.zeros(2, np.uint8)

    def run(self):
        self.native.model.step(
            self.tokens, self.row_start, self.context, self.tables, self.cos, self.sin, self.outputs, self.broken
        )


@pytest.fixture(scope="module")
def native():
    return Native(Shape())


def test_the_undamaged_call_runs(native):
    Call(native).run()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", np.array([1, 2, 3, 50], np.int32)),
        ("tokens", np.array([1, 2, -1, 3], np.int32)),
        ("tokens", np.array([1, 2, 3], np.int32)),
        ("row_start", np.array([0, 3, 5], np.int32)),
        ("row_start", np.array([1, 3, 4], np.int32)),
        ("row_start", np.array([0, 0, 4], np.int32)),
        ("row_start", np.array([0, 5, 4], np.int32)),
        ("row_start", np.array([0, 4], np.int32)),
        ("row_start", np.array([], np.int32)),
        ("context", np.array([0, -1], np.int32)),
        ("context", np.array([0, 64], np.int32)),
        ("context", np.array([0, 2**31 - 1], np.int32)),
        ("context", np.array([0], np.int32)),
        ("tables", np.full((1, 2, 4), 80, np.int32)),
        ("tables", np.full((1, 2, 4), -1, np.int32)),
        ("tables", np.zeros((1, 1, 4), np.int32)),
        ("tables", np.zeros((2, 2, 4), np.int32)),
        ("tables", np.zeros((1, 2, 0), np.int32)),
        ("cos", []),
        ("cos", [np.zeros((3, 8), np.float32)]),
        ("cos", [np.zeros((4, 7), np.float32)]),
        ("sin", [np.zeros((4, 7), np.float32)]),
        ("outputs", np.array([4], np.int32)),
        ("outputs", np.array([-1], np.int32)),
        ("outputs", np.zeros(5, np.int32)),
        ("broken", np.zeros(1, np.uint8)),
    ],
)
def test_a_damaged_step_is_refused_before_it_runs(native, field, value):
    call = Call(native)
    setattr(call, field, value)
    with pytest.raises((ValueError, TypeError)):
        call.run()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_arguments_run_or_are_refused(native, data):
    """Whatever comes in, there is an answer or an error; the sanitizer build runs this too."""
    call = Call(native)
    small = st.integers(-3, 90)
    number = st.one_of(small, st.sampled_from([2**31 - 1, -(2**31), 2**30]))

    def ints(*shape):
        count = int(np.prod(shape))
        return np.array(data.draw(st.lists(number, min_size=count, max_size=count)), np.int32).reshape(shape)

    for field in data.draw(
        st.lists(st.sampled_from(["row_start", "context", "tables", "outputs", "tokens"]), max_size=3)
    ):
        size = data.draw(st.integers(0, 5))
        setattr(call, field, ints(1, data.draw(st.integers(0, 3)), size) if field == "tables" else ints(size))
    try:
        call.run()
    except ValueError:
        return
    rows = len(call.outputs)
    call.native.model.logits(0, np.empty((rows, call.native.s.vocab), np.float32))


def test_logits_of_rows_that_were_not_kept_are_refused(native):
    Call(native).run()
    for first, count in ((0, 3), (2, 1), (-1, 1)):
        with pytest.raises(ValueError):
            native.model.logits(first, np.empty((count, native.s.vocab), np.float32))
    with pytest.raises(ValueError):
        native.model.logits(0, np.empty((1, native.s.vocab - 1), np.float32))


@pytest.mark.parametrize(("source", "target"), [(-1, 0), (0, 80), (80, 0), (0, -1)])
def test_copies_out_of_range_are_refused(native, source, target):
    with pytest.raises(ValueError):
        native.model.copy_block(source, target)


def test_arguments_of_another_type_or_order_are_refused(native):
    for value in (np.zeros((1, 2, 4), np.int64), np.zeros((4, 2, 1), np.int32).T):
        call = Call(native)
        call.tables = value
        with pytest.raises((TypeError, ValueError)):
            call.run()
