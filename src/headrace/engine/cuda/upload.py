"""Tensors from checkpoint files to the device: mapped file → pinned ring → device, several pieces at a time."""

from __future__ import annotations

import itertools
import queue
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from headrace.base.errors import UnsupportedModel
from headrace.engine.cuda.products import Matrix, PackedParts
from headrace.engine.cuda.repack import repacked
from headrace.engine.kernels.quantized import QuantMatrix
from headrace.engine.quant.formats import Format, Packed
from headrace.engine.weights.checkpoint import Checkpoint

_PIECE_BYTES = 32 << 20
_THREADS = 8
_KINDS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix of a checkpoint, or the rows `cut` of tensor `name`, which has `shape`; `order`: its rows as wanted."""

    name: str
    shape: tuple[int, int]
    cut: slice | None = None
    order: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return self.shape[0] if self.cut is None else self.cut.stop - self.cut.start


@cache
def upload_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The stream of one upload thread, the same for every model of a process.

    torch has 32 streams and hands them out in turns: with new ones for every model, the fifth would copy on the stream that
    graphs are captured on at that moment, which ends the capture with an error.
    """
    return torch.cuda.Stream(device)


def tensors_of(matrix: QuantMatrix | Packed) -> list[torch.Tensor]:
    return matrix.tensors() if isinstance(matrix, QuantMatrix) else list(matrix.tensors.values())


class Uploader:
    """Fills device tensors from a checkpoint in the background; `finish` waits and raises what went wrong.

    A dummy checkpoint (`seed` given) is drawn on the device: normal with deviation 0.02, ones for norms, zeros for biases;
    the values depend on seed, name and device type.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, seed: int | None) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._seed = seed
        self._pool = ThreadPoolExecutor(_THREADS if device.type == "cuda" else 1, thread_name_prefix="upload")
        self._running: list[Future[None]] = []
        self._local = threading.local()
        self._rings: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._whole = threading.Lock()
        self._started = itertools.count()
        self.bytes_read = 0
        self.rounded: list[str] = []
        """Tensors whose scales had to be rounded to the format's type."""

    def fill(
        self,
        target: torch.Tensor,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: slice | None = None,
        order: np.ndarray | None = None,
        plus: float = 0.0,
    ) -> None:
        """target = tensor `name` of `shape`, or its `rows`, with its rows in `order`, plus a constant.

        `target` is contiguous; a missing or misshapen tensor raises `CorruptCheckpoint` here, at once.
        """
        if self._seed is not None:
            self._draw(target, name)
            if plus:
                target.add_(plus)
            return
        self._running.append(self._pool.submit(self._take(target, name, shape, rows, order, plus)))

    def _take(
        self, target: torch.Tensor, name: str, shape: tuple[int, ...], rows: slice | None, order, plus: float
    ) -> Callable[[], None]:
        """What is to be done so that target holds the tensor, which is looked for here, at once."""
        stored = self._checkpoint.stored(name, shape)
        # Vectors are stored as one row; as columns of one element their entries can be cut and reordered like rows.
        data = stored.data
        if len(shape) == 1 and stored.kind in _KINDS:
            data = data.reshape(shape[0], -1)
        if stored.kind in _KINDS:
            if rows is not None:
                data = data[rows]
            kind = _KINDS[stored.kind]
            self.bytes_read += data.nbytes
            return lambda: self._raw(target, data, kind, order, plus)
        self.bytes_read += data.nbytes
        return lambda: self._converted(target, name, shape, rows, order, plus)

    def quantize(self, target: Matrix, form: Format, parts: Sequence[Part]) -> None:
        """target = the matrices `parts`, joined by their outputs, in `form`: as a checkpoint that is quantized holds them, or
        rounded on the device. One matrix at a time is there in full precision."""
        self._running.append(self._pool.submit(self._quantized, target, form, parts))

    def _quantized(self, target: Matrix, form: Format, parts: Sequence[Part]) -> None:
        found: list[Packed] = []
        stored: dict[str, list[Packed]] = {}
        with self._whole, self._stream():
            for part in parts:
                if not self._checkpoint.is_packed(part.name):
                    found.append(form.quantize(self._values(part), part.name))
                    continue
                if part.order is not None:
                    raise UnsupportedModel(
                        f"tensor {part.name!r} is quantized and its outputs are in another order than the kernels'",
                        field=part.name,
                    )
                if part.name not in stored:
                    stored[part.name] = self._adopted(form, [p for p in parts if p.name == part.name])
                found.append(stored[part.name].pop(0))
            sources = found if isinstance(target, PackedParts) else [repacked(found)]
            places = target.parts if isinstance(target, PackedParts) else [target]
            for source, place in zip(sources, places, strict=True):
                for values, into in zip(tensors_of(source), tensors_of(place), strict=True):
                    into.copy_(values)
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def _values(self, part: Part) -> torch.Tensor:
        values = torch.empty(part.rows, part.shape[1], dtype=torch.float32, device=self._device)
        if self._seed is None:
            self._take(values, part.name, part.shape, part.cut, part.order, 0.0)()
        else:
            self._draw(values, part.name)
        return values

    def _adopted(self, form: Format, parts: Sequence[Part]) -> list[Packed]:
        name, shape = parts[0].name, parts[0].shape
        arrays = self._checkpoint.packed(name, shape)
        assert arrays is not None
        if arrays.rounded:
            self.rounded.append(name)
        whole = form.adopt(arrays, name)
        cut = [whole] if len(parts) == 1 else form.split(whole, [p.rows for p in parts], name)
        return [replace(p, tensors={k: t.to(self._device) for k, t in p.tensors.items()}) for p in cut]

    def finish(self) -> None:
        for future in self._running:
            future.result()
        self._running.clear()
        self._pool.shutdown()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._seed is None:
            self._checkpoint.finish()

    def _draw(self, target: torch.Tensor, name: str) -> None:
        if name.endswith("bias"):
            target.zero_()
        elif "norm" in name:
            target.fill_(1.0)
        else:
            generator = torch.Generator(self._device).manual_seed(self._seed * 2**32 + zlib.crc32(name.encode()))
            target.normal_(0.0, 0.02, generator=generator)

    def _raw(self, target: torch.Tensor, data: np.ndarray, kind: torch.dtype, order, plus: float) -> None:
        same = kind == target.dtype and order is None and not plus
        into = target if same else torch.empty(target.shape, dtype=kind, device=self._device)
        self._send(np.ascontiguousarray(data).reshape(-1), into.view(-1).view(torch.uint8))
        if not same:
            self._place(target, into, order, plus)

    def _converted(self, target: torch.Tensor, name: str, shape, rows, order, plus: float) -> None:
        values = self._checkpoint.take(name, shape)
        values = np.ascontiguousarray(values if rows is None else values[rows])
        into = torch.empty(target.shape, dtype=torch.float32, device=self._device)
        self._send(values.reshape(-1).view(np.uint8), into.view(-1).view(torch.uint8))
        self._place(target, into, order, plus)

    def _place(self, target: torch.Tensor, found: torch.Tensor, order, plus: float) -> None:
        with self._stream():
            if order is not None:
                found = found.index_select(0, torch.from_numpy(order).to(self._device))
            target.copy_(found + plus if plus else found)
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # before `found` is freed for another stream

    def _stream(self):
        if self._device.type != "cuda":
            return torch.no_grad()
        if not hasattr(self._local, "stream"):
            torch.cuda.set_device(self._device)
            self._local.stream = upload_stream(self._device, next(self._started) % _THREADS)
            self._local.ring = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._local.events = [torch.cuda.Event() for _ in range(2)]
        return torch.cuda.stream(self._local.stream)

    def _send(self, data: np.ndarray, target: torch.Tensor) -> None:
        """Copy bytes, pinned piece by pinned piece: one is filled while the other travels."""
        if self._device.type != "cuda":
            target.copy_(torch.from_numpy(data if data.flags.writeable else data.copy()))
            return
        with self._stream():
            local = self._local
            for i, at in enumerate(range(0, len(data), _PIECE_BYTES)):
                piece, event = local.ring[i % 2], local.events[i % 2]
                event.synchronize()
                count = min(_PIECE_BYTES, len(data) - at)
                np.copyto(piece.numpy()[:count], data[at : at + count])
                target[at : at + count].copy_(piece[:count], non_blocking=True)
                event.record(local.stream)
            local.stream.synchronize()
