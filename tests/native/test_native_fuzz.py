"""Whatever arguments reach the extension, there is an answer or an error: nothing out of range gets to the kernels.

Run as part of the suite, and under the sanitizers by `make check-native`, where a read or write out of bounds ends the run.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import headrace_native
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_layer import SLOTS, Native, Shape

from headrace.engine.native.memory import buffer
from headrace.spec.packing import PACKINGS

POOL = headrace_native.Pool(2)
REFUSED = (ValueError, TypeError, KeyError, RuntimeError, OverflowError)
FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ODD = st.sampled_from([-(2**63), -(2**31), -1, 0, 1, 2**30, 2**31 - 1, 2**31, 2**40, 2**60, 2**63 - 1])
SIZE = st.one_of(st.integers(-2, 70), st.sampled_from([256, 512]), ODD)
SHAPES = [
    Shape(),
    Shape(window=20, softcap=10.0, kv="fp16"),
    Shape(heads=2, kv_heads=2, head_dim=32, rope_dim=16, qk_norm=True, kv="int8", block_tokens=32),
    Shape(kv="fp8"),
    Shape(window=35, kv="bf16"),
]


@pytest.fixture(scope="module")
def natives():
    return [Native(shape, exact=exact) for shape in SHAPES for exact in (True, False)]


@pytest.fixture(scope="module")
def four_bit():
    return Native(Shape(kv="int4", window=50))


def random_step(s, data):
    """The arguments of a valid step of random sequences with random blocks."""
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    starts = data.draw(st.lists(st.integers(0, 90), min_size=len(lengths), max_size=len(lengths)))
    width = max(-(-(a + n) // s.block_tokens) for a, n in zip(starts, lengths, strict=True))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    positions = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)])
    rows = len(positions)
    cos, sin = s.angles(positions)
    return {
        "tokens": rng.integers(0, s.vocab, rows).astype(np.int32),
        "row_start": np.cumsum([0, *lengths]).astype(np.int32),
        "context": np.array(starts, np.int32),
        "tables": rng.integers(0, s.blocks, (1, len(lengths), width)).astype(np.int32),
        "cos": [cos],
        "sin": [sin],
        "outputs": rng.integers(0, rows, rng.integers(0, rows + 1)).astype(np.int32),
        "broken": np.zeros(len(lengths), np.uint8),
    }


def damage(arguments, names, data):
    """Change none, one or two of the arguments, in one number or in their shape; returns which."""
    damaged = data.draw(st.lists(st.sampled_from(names), max_size=2))
    for name in damaged:
        value = arguments[name]
        if value.size and data.draw(st.booleans()):
            odd = data.draw(st.one_of(st.integers(-3, 200), ODD))
            value.flat[data.draw(st.integers(0, value.size - 1))] = np.int64(odd).astype(np.int32)
        else:
            shape = [max(0, n + data.draw(st.integers(-1, 1))) for n in value.shape]
            arguments[name] = np.resize(value, shape).astype(np.int32)
    return damaged


def answer_or_error(native, arguments, damaged):
    try:
        native.model.step(*arguments.values())
    except REFUSED:
        assert damaged
        return
    out = np.empty((len(arguments["outputs"]), native.s.vocab), np.float32)
    native.model.logits(0, out)


@FUZZ
@given(st.data())
def test_steps_of_random_tables_and_shapes(natives, data):
    """Valid steps of random sequences with random blocks, some of them damaged in one or two places."""
    native = data.draw(st.sampled_from(natives))
    arguments = random_step(native.s, data)
    damaged = damage(arguments, ["tokens", "row_start", "context", "tables", "outputs"], data)
    answer_or_error(native, arguments, damaged)


@FUZZ
@given(st.data())
def test_steps_of_a_four_bit_pool(four_bit, data):
    """The same with slots and restored groups. No block is two sequences' here: their writes would race, which is the
    caller's affair and would end a run under the thread sanitizer."""
    arguments = random_step(four_bit.s, data)
    shape = arguments["tables"].shape
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    arguments["tables"] = rng.permutation(four_bit.s.blocks)[: np.prod(shape)].reshape(shape).astype(np.int32)
    arguments["slots"] = rng.permutation(SLOTS)[: shape[1]].astype(np.int32)
    arguments["restored"] = rng.integers(0, 2, shape[1]).astype(np.uint8)
    damaged = damage(arguments, ["tokens", "row_start", "context", "outputs", "slots"], data)
    answer_or_error(four_bit, arguments, damaged)


@FUZZ
@given(SIZE, SIZE, SIZE, SIZE, SIZE, st.one_of(st.integers(0, 5000), st.none()))
def test_matrices_of_random_shapes(codes, scales, zero, n, k, count):
    """`count` None: as many bytes as the format says, if it says something that can be allocated."""
    try:
        if count is None:
            count = headrace_native.packed_bytes(codes, scales, n, k)
            if not 0 <= count <= 1 << 22:
                return
        matrix = headrace_native.Matrix(np.zeros(count, np.uint8), codes, scales, zero, n, k)
    except REFUSED:
        return
    assert matrix.nbytes == count
    matrix.dequantize(np.empty((n, k), np.float32))


@FUZZ
@given(st.data())
def test_packing_of_random_sources(data):
    source = data.draw(st.one_of(st.sampled_from([0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30]), SIZE))
    form = data.draw(st.sampled_from(list(PACKINGS.values())))
    n, k = data.draw(st.integers(0, 40)), data.draw(st.sampled_from([1, 31, 32, 33, 64, 100, 256, 512]))
    n, k = (data.draw(SIZE), data.draw(SIZE)) if data.draw(st.integers(0, 3)) == 0 else (n, k)
    count = data.draw(st.sampled_from([0, 1, 4 * 40 * 512, 1000]))
    if 0 < n <= 70 and 0 < k <= 512:
        blocks = {0: (1, 4), 1: (1, 2), 30: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34)}
        blocks |= {12: (256, 144), 13: (256, 176), 14: (256, 210)}
        if source in blocks and data.draw(st.integers(0, 4)):
            count = n * (k // blocks[source][0]) * blocks[source][1]
    raw = np.random.default_rng(0).integers(0, 256, count).astype(np.uint8)
    out = np.zeros(form.nbytes(n, k) if 0 < n <= 70 and 0 < k <= 512 else 64, np.uint8)
    try:
        headrace_native.pack(raw, source, out, form.codes, form.scales, form.zero, n, k, POOL)
    except REFUSED:
        return
    if n == 0:
        return
    matrix = headrace_native.Matrix(out, form.codes, form.scales, form.zero, n, k)
    matrix.dequantize(np.empty((n, k), np.float32))
    x = np.random.default_rng(1).standard_normal((3, k)).astype(np.float32)
    for kernels in headrace_native.kernels():
        headrace_native.gemm(matrix, x, np.empty((3, -(-n // 16) * 16), np.float32), kernels)


@FUZZ
@given(st.data())
def test_models_of_random_geometry(data):
    """A layer whose numbers and shapes do not belong together is refused when it is added, or when the pool is set."""
    s = replace(SHAPES[0], blocks=8)
    native = Native.__new__(Native)
    native.s, native.pool, native.kept = s, POOL, []
    w = s.weights
    config = {"hidden": s.hidden, "vocab": s.vocab, "eps": 1e-6}
    layer = {
        "heads": s.heads, "kv_heads": s.kv_heads, "head_dim": s.head_dim, "scale": 0.25, "window": 0,
        "rope": 0, "rope_dim": s.rope_dim, "qkv": [native.matrix(w[n]) for n in "qkv"],
        "out": [native.matrix(w["out"])], "gate_up": [native.matrix(w["gate"]), native.matrix(w["up"])],
        "down": [native.matrix(w["down"])], "attention_norm": w["attention_norm"], "mlp_norm": w["mlp_norm"],
    }  # fmt: skip
    kv = {"type": 1, "slots": 1, "blocks": s.blocks, "block_tokens": 16, "kv_heads": s.kv_heads}
    kv |= {"head_dim": s.head_dim, "value_dim": s.head_dim, "groups": 1}
    numbers = ["heads", "kv_heads", "head_dim", "value_dim", "window", "rope", "rope_dim", "group", "slot", "top_k"]
    vectors = ["attention_norm", "mlp_norm", "q_norm", "k_norm", "sinks", "qkv_bias", "post_mlp_norm", "down_bias"]
    matrices = ["qkv", "out", "gate_up", "down"]
    for _ in range(data.draw(st.integers(0, 2))):
        match data.draw(st.integers(0, 4)):
            case 0:
                layer[data.draw(st.sampled_from(numbers))] = data.draw(SIZE)
            case 1:
                count = data.draw(st.sampled_from([0, 1, 16, 64, 96]))
                layer[data.draw(st.sampled_from(vectors))] = np.zeros(count, np.float32)
            case 2:
                shape = [data.draw(st.sampled_from([1, 16, 32, 64, 96])) for _ in range(2)]
                parts = data.draw(st.integers(0, 3))
                layer[data.draw(st.sampled_from(matrices))] = [native.matrix(np.zeros(shape, np.float32))] * parts
            case 3:
                kv[data.draw(st.sampled_from(list(kv)))] = data.draw(SIZE)
            case 4:
                config[data.draw(st.sampled_from(["hidden", "vocab", "activation"]))] = data.draw(SIZE)
    try:
        native.model = headrace_native.Model(config, POOL)
        native.model.add_layer(layer)
        table = native.matrix(w["embedding"])
        native.model.set_ends(table, table, w["final_norm"])
        native.model.set_kv(buffer(s.blocks * 16 * s.kv_heads * 2 * s.head_dim * 4), *kv.values())
        native.step([(0, 0, np.arange(20))], np.arange(s.blocks, dtype=np.int32)[None, :2])
    except REFUSED:
        return


@FUZZ
@given(st.data())
def test_sampling_of_random_columns(data):
    rows, vocab = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 40))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = rng.choice([0.0, 1.0, -3.0, 50.0, np.inf, -np.inf, np.nan], (rows, vocab)).astype(np.float32)

    def column(kind, values):
        return np.array(data.draw(st.lists(values, min_size=rows, max_size=rows)), kind)

    flags = st.integers(0, 1)
    columns = [
        column(np.uint8, flags), column(np.uint8, flags), column(np.float32, st.floats(0, 3, width=32)),
        column(np.int64, ODD), column(np.float64, st.floats(0, 1)), column(np.float32, st.floats(0, 1, width=32)),
        column(np.float64, st.floats(0, 1)), np.zeros(rows, np.int64), np.zeros(rows, np.uint8),
    ]  # fmt: skip
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(columns) - 1))
        columns[at] = np.resize(columns[at], data.draw(st.integers(0, 6)))
    try:
        headrace_native.sample(logits, *columns, POOL)
        chosen, state = columns[-2:]
        assert ((chosen >= 0) & (chosen < max(vocab, 1)) | (state != 0)).all()
    except REFUSED:
        pass
    width = data.draw(st.integers(0, 6))
    ids, wanted = column(np.int64, st.one_of(SIZE)), column(np.int64, SIZE)
    with suppress(*REFUSED):
        headrace_native.logprobs(
            logits, ids, wanted, np.empty(rows), np.empty(rows, np.int64),
            np.empty((rows, width), np.int64), np.empty((rows, width)), POOL,
        )  # fmt: skip


@pytest.mark.parametrize(("n", "k"), [(2**60, 32), (32, 2**60), (2**32, 2**32), (2**31, 1)])
def test_sizes_whose_bytes_would_overflow_are_refused(n, k):
    """2**56 tiles of 2**11 bytes are no bytes at all in 64 bits."""
    form = PACKINGS["fp32"]
    nothing = np.zeros(0, np.uint8)
    with pytest.raises(ValueError, match="n, k"):
        headrace_native.Matrix(nothing, form.codes, form.scales, form.zero, n, k)
    with pytest.raises(ValueError, match="n, k"):
        headrace_native.pack(nothing, 0, nothing, form.codes, form.scales, form.zero, n, k, POOL)


def test_a_pool_of_more_blocks_than_its_bytes_is_refused():
    native = Native(Shape(blocks=8))
    s = native.s
    for slots, blocks in ((1, 9), (2, 8), (2**16, 2**31 - 1), (1, 2**61), (1, 0), (0, 8)):
        with pytest.raises(ValueError):
            native.model.set_kv(native.kv, 1, slots, blocks, 16, s.kv_heads, s.head_dim, s.head_dim, 1)
    with pytest.raises(ValueError, match="before the KV pool"):
        native.model.add_layer({"heads": 4, "kv_heads": 2, "head_dim": 16, "scale": 1.0})


def test_a_step_without_embedding_is_refused():
    made = Native(Shape(blocks=8))
    bare = headrace_native.Model({"hidden": 64, "vocab": 50}, POOL)
    bare.set_kv(made.kv, 1, 1, 8, 16, 2, 16, 16, 1)
    one = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="no embedding"):
        bare.step(one, np.array([0, 1], np.int32), one, one.reshape(1, 1, 1), [], [], one, np.zeros(1, np.uint8))
