"""Packing keeps every stored value: the gguf package's quantizers and dequantizers are the oracle."""

from __future__ import annotations

import gguf
import headrace_native
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from headrace.engine.native.arena import Arena
from headrace.engine.weights.source import Stored
from headrace.spec.ggml import GGML_TYPES_BY_NAME
from headrace.spec.packing import PACKINGS, packing

QUANTIZED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
SHAPES = ((16, 256), (1, 256), (50, 512), (17, 2304))


def stored(kind: str, rows: int, columns: int, seed: int = 0) -> Stored:
    """Random blocks of a type: made by its quantizer, or, where the oracle has none, of random bits with sane scales."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, columns)).astype(np.float32) * 0.1
    code = Kind[kind.upper()]
    try:
        data = gguf.quantize(values, code)
    except NotImplementedError:
        block = GGML_TYPES_BY_NAME[kind]
        data = rng.integers(0, 256, (rows, columns // block.block_elements, block.block_bytes), dtype=np.uint8)
        places = {"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}[kind]
        for at in places:  # fp16 scales: any but infinities
            scale = rng.uniform(-0.01, 0.01, data.shape[:2]).astype(np.float16)
            data[..., at : at + 2] = scale[..., None].view(np.uint8)
        data = data.reshape(rows, -1)
    return Stored(kind, np.ascontiguousarray(data.view(np.uint8)), columns)


def oracle(source: Stored) -> np.ndarray:
    return gguf.dequantize(source.data, Kind[source.kind.upper()]).reshape(source.rows, source.columns)


def packed(source: Stored, wanted: str = "auto", threads: int = 2):
    arena = Arena()
    form = packing(source.kind, wanted, "matrix")
    place = arena.reserve("w", source, form)
    arena.adopt(arena.fill(headrace_native.Pool(threads)))
    matrix = arena.matrix(place)
    assert matrix.nbytes == form.nbytes(source.rows, source.columns)
    out = np.empty((source.rows, source.columns), np.float32)
    matrix.dequantize(out)
    return matrix, out, arena


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("shape", SHAPES)
def test_repacking_loses_nothing(kind, shape):
    source = stored(kind, *shape)
    _, values, _ = packed(source)
    # The oracle multiplies in another order, which may round the last bit.
    np.testing.assert_allclose(values, oracle(source), rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 7), (40, 100)])
def test_floats_are_kept_to_the_bit(kind, shape):
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    if kind == "f16":
        data = values.astype(np.float16)
        exact = data.astype(np.float32)
    elif kind == "bf16":
        data = (values.view(np.uint32) >> 16).astype(np.uint16)
        exact = (data.astype(np.uint32) << 16).view(np.float32)
    else:
        data = exact = values
    _, found, _ = packed(Stored(kind, data.view(np.uint8), shape[1]))
    np.testing.assert_array_equal(found, exact)


@pytest.mark.parametrize(("wanted", "levels"), [("int8", 127 * 2), ("int4", 15)])
@pytest.mark.parametrize("kind", ["f32", "f16", "q6_k"])
def test_quantizing_at_load_is_as_close_as_its_step(wanted, levels, kind):
    rng = np.random.default_rng(2)
    if kind == "q6_k":
        source = stored(kind, 33, 512)
        values = oracle(source)
    else:
        values = (rng.standard_normal((33, 512)) * rng.uniform(0.01, 4, (33, 1))).astype(kind.replace("f", "float"))
        source = Stored(kind, values.view(np.uint8), 512)
        values = values.astype(np.float32)
    _, found, _ = packed(source, wanted)
    groups = values.reshape(33, -1, 32)
    spread = groups.max(-1) - groups.min(-1) if wanted == "int4" else 2 * np.abs(groups).max(-1)
    step = spread / levels
    error = np.abs(found.reshape(groups.shape) - groups).max(-1)
    # Half a step, and what rounding scale and minimum to fp16 adds.
    assert (error <= step * 0.5 + np.abs(groups).max(-1) * 2**-10 + 1e-6).all()


def test_what_has_as_many_bits_is_not_quantized_again():
    for kind, wanted in (("q8_0", "int8"), ("q4_0", "int4"), ("q4_k", "int4"), ("q4_1", "q4")):
        assert packing(kind, wanted, "matrix").name == kind
    assert packing("q4_0", "int4", "table").name == "q8_0"
    assert packing("q4_0", "fp32", "matrix").name == "fp32"
    assert packing("q4_0", "int8", "router").name == "fp32"


def test_threads_pack_the_same_bytes():
    source = stored("q4_1", 333, 512)
    one, two = (packed(source, threads=n)[2]._memory for n in (1, 3))
    np.testing.assert_array_equal(one, two)


def test_spec_and_native_code_agree_on_every_layout():
    for form in PACKINGS.values():
        for n, k in ((1, 1), (16, 32), (17, 33), (100, 256), (576, 1536), (5, 300)):
            assert headrace_native.packed_bytes(form.codes, form.scales, n, k) == form.nbytes(n, k)
    for kind in (*QUANTIZED, "f32", "f16", "bf16"):
        form = packing(kind, "auto", "matrix")
        assert headrace_native.natural_format(GGML_TYPES_BY_NAME[kind].id) == (form.codes, form.scales, form.zero)


@pytest.mark.parametrize("change", ["short source", "short target", "type", "format", "blocks", "scales"])
def test_wrong_buffers_are_refused_before_they_are_read(change):
    source = stored("q4_1", 32, 256)
    form, pool = PACKINGS["q4_1"], headrace_native.Pool(1)
    data, kind, out = source.data.reshape(-1), 3, np.zeros(form.nbytes(32, 256), np.uint8)
    codes, scales, zero, n, k = form.codes, form.scales, form.zero, 32, 256
    match change:
        case "short source":
            data = data[:-1].copy()
        case "short target":
            out = out[:-64].copy()
        case "type":
            kind = 10
        case "format":
            zero = 8
        case "blocks":
            k = 255
        case "scales":
            scales = 9
    with pytest.raises(ValueError):
        headrace_native.pack(data, kind, out, codes, scales, zero, n, k, pool)
