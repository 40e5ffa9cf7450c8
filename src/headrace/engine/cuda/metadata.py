"""All integers of a step in one pinned buffer, so that one copy carries them to the device."""

from __future__ import annotations

import numpy as np
import torch

_ALIGN = 4
"""Every array starts at a multiple of 16 bytes, which is what kernels are compiled for."""


class Packed:
    """Where each array of a step lies in the device buffer; `views` are int32 tensors over it."""

    def __init__(self, device_buffer: torch.Tensor, spans: dict[str, tuple[int, int]]) -> None:
        self._buffer = device_buffer
        self._spans = spans

    def __getitem__(self, name: str) -> torch.Tensor:
        at, count = self._spans[name]
        return self._buffer[at : at + count]

    def __contains__(self, name: str) -> bool:
        return name in self._spans


class Metadata:
    """Packs arrays into a ring of pinned buffers and sends each with one copy into the same device buffer."""

    def __init__(self, capacity: int, device: torch.device, ring: int = 4) -> None:
        cuda = device.type == "cuda"
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._host = [torch.zeros(capacity, dtype=torch.int32, pin_memory=cuda) for _ in range(ring)]
        self._arrays = [h.numpy() for h in self._host]
        self._events = [torch.cuda.Event() if cuda else None for _ in range(ring)]
        self._next = 0

    @property
    def nbytes(self) -> int:
        return self._device.nbytes

    def offsets(self, sizes: dict[str, int]) -> Packed:
        """The places that arrays of these sizes get when they are packed in this order."""
        spans, at = {}, 0
        for name, count in sizes.items():
            spans[name] = (at, count)
            at += -(-count // _ALIGN) * _ALIGN
        return Packed(self._device, spans)

    def send(self, arrays: dict[str, np.ndarray]) -> Packed:
        """Copy int32 arrays (fp32 ones keep their bits) to the device, in order, without waiting."""
        ring = self._next
        self._next = (ring + 1) % len(self._host)
        event = self._events[ring]
        if event is not None:
            event.synchronize()  # the copy of four steps ago; long done
        host, spans, at = self._arrays[ring], {}, 0
        for name, array in arrays.items():
            flat = array.reshape(-1)
            host[at : at + len(flat)] = flat if flat.dtype != np.float32 else flat.view(np.int32)
            spans[name] = (at, len(flat))
            at += -(-len(flat) // _ALIGN) * _ALIGN
        self._device[:at].copy_(self._host[ring][:at], non_blocking=True)
        if event is not None:
            event.record()
        return Packed(self._device, spans)
