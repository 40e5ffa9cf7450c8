"""All packed weights of a model in one buffer: places are handed out first, then everything is packed in parallel."""

from __future__ import annotations

import hashlib

import headrace_native
import msgspec
import numpy as np

from headrace.engine.native.memory import buffer
from headrace.engine.weights.source import Floats, Stored
from headrace.spec.ggml import GGML_TYPES_BY_NAME
from headrace.spec.packing import Packing, aligned


class Place(msgspec.Struct, frozen=True):
    """Where a matrix lies in the arena; `Arena.matrix` makes it usable once the arena is filled."""

    offset: int
    form: Packing
    outputs: int
    inputs: int

    @property
    def nbytes(self) -> int:
        return self.form.nbytes(self.outputs, self.inputs)


class _VectorPlace(msgspec.Struct, frozen=True):
    offset: int
    """From the first vector, in bytes."""
    count: int


class Arena:
    """Reserve every matrix and vector, then `fill`; `nbytes` is the size of the one allocation.

    Vectors lie behind the matrices with nothing between them, so that biases joined into one take what they took apart.
    """

    def __init__(self) -> None:
        self._matrix_bytes = self._vector_bytes = 0
        self._matrices: list[tuple[Place, Stored]] = []
        self._vectors: list[tuple[_VectorPlace, Floats]] = []
        self._memory = np.empty(0, np.uint8)
        self._layout = hashlib.sha256()

    @property
    def nbytes(self) -> int:
        return self._matrix_bytes + self._vector_bytes

    def reserve(self, name: str, stored: Stored, form: Packing) -> Place:
        place = Place(self._matrix_bytes, form, stored.rows, stored.columns)
        self._layout.update(f"{name} {place} {stored.kind};".encode())
        self._matrix_bytes += aligned(place.nbytes)
        self._matrices.append((place, stored))
        return place

    def reserve_vector(self, name: str, values: Floats) -> _VectorPlace:
        place = _VectorPlace(self._vector_bytes, len(values))
        self._layout.update(f"{name} {place};".encode())
        self._vector_bytes += 4 * place.count
        self._vectors.append((place, values))
        return place

    def layout_digest(self) -> bytes:
        """Identifies which tensor lies where in which form, not the values."""
        return self._layout.digest()

    def fill(self, pool: headrace_native.Pool) -> np.ndarray:
        """Pack everything; the buffer is returned, still writable."""
        memory = buffer(self.nbytes)
        for place, stored in self._matrices:
            form, out = place.form, memory[place.offset : place.offset + place.nbytes]
            natural = form.name == {"f32": "fp32", "f16": "fp16"}.get(stored.kind, stored.kind)
            source = stored if natural or stored.kind in _FLOATS else _dequantized(stored)
            raw = np.ascontiguousarray(source.data).reshape(-1)
            kind = GGML_TYPES_BY_NAME[source.kind].id
            headrace_native.pack(raw, kind, out, form.codes, form.scales, form.zero, place.outputs, place.inputs, pool)
        for vector, values in self._vectors:
            at = self._matrix_bytes + vector.offset
            memory[at : at + 4 * vector.count] = np.ascontiguousarray(values).view(np.uint8)
        return memory

    def adopt(self, memory: np.ndarray) -> None:
        """Use `memory`, which `fill` made now or in an earlier process; what was reserved is forgotten."""
        if len(memory) != self.nbytes:
            raise ValueError(f"{len(memory)} bytes of packed weights where {self.nbytes} belong")
        self._memory = memory
        self._matrices.clear()
        self._vectors.clear()

    def matrix(self, place: Place) -> headrace_native.Matrix:
        form = place.form
        data = self._memory[place.offset : place.offset + place.nbytes]
        return headrace_native.Matrix(data, form.codes, form.scales, form.zero, place.outputs, place.inputs)

    def vector(self, place: _VectorPlace) -> Floats:
        at = self._matrix_bytes + place.offset
        return self._memory[at : at + 4 * place.count].view(np.float32)


_FLOATS = ("f32", "f16", "bf16")


def _dequantized(stored: Stored) -> Stored:
    from headrace.engine.weights.dequantize import dequantize

    values = np.empty((stored.rows, stored.columns), np.float32)
    dequantize(np.ascontiguousarray(stored.data), GGML_TYPES_BY_NAME[stored.kind], values)
    return Stored.of_floats(values)
