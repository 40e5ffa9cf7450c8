"""Tensors from checkpoint files to the device: mapped file → pinned ring → device, several pieces at a time."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from headrace.engine.weights.checkpoint import Checkpoint

_PIECE_BYTES = 32 << 20
_THREADS = 8
_KINDS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


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
        self.bytes_read = 0

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
        stored = self._checkpoint.stored(name, shape)
        # Vectors are stored as one row; as columns of one element their entries can be cut and reordered like rows.
        data = stored.data
        if len(shape) == 1 and stored.kind in _KINDS:
            data = data.reshape(shape[0], -1)
        if stored.kind in _KINDS:
            if rows is not None:
                data = data[rows]
            kind = _KINDS[stored.kind]
            work: Callable[[], None] = lambda: self._raw(target, data, kind, order, plus)  # noqa: E731
            self.bytes_read += data.nbytes
        else:
            work = lambda: self._converted(target, name, shape, rows, order, plus)  # noqa: E731
            self.bytes_read += data.nbytes
        self._running.append(self._pool.submit(work))

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
            self._local.stream = torch.cuda.Stream(self._device)
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
