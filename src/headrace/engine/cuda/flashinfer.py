"""Attention by the flashinfer package in place of our kernels, over the same pool: planned once per step on the host.

A block of the pool, [2, kv_heads, block_tokens, head_dim], is a page of flashinfer's layout HND as it lies. Queries and keys
are rotated and stored by our own kernel before.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.base.errors import InvalidInput
from headrace.base.units import MIB
from headrace.spec.accounting import cache_layout
from headrace.spec.cache import CacheLayout
from headrace.spec.model import ModelSpec

PACKAGE = "flashinfer-python"
OLDEST = (0, 6)
HEAD_DIMS = (64, 128, 256)
INT_WORKSPACE_BYTES = 8 * MIB
"""What a wrapper of the package allocates on the device for its plan."""

Ints = npt.NDArray[np.int64]


def unfit(spec: ModelSpec, computed: str, kv: str, device: torch.device) -> str | None:
    """Why flashinfer cannot compute this model's attention here, in one line; None if it can. `computed`: the activations'
    precision."""
    if find_spec("flashinfer") is None:
        return f"the package is not installed (pip install {PACKAGE})"
    if device.type != "cuda":
        return "it needs an NVIDIA GPU"
    for i, layer in enumerate(spec.layers):
        if layer.mixer.head_dim not in HEAD_DIMS:
            known = ", ".join(map(str, HEAD_DIMS))
            return f"layer {i}: it has kernels for heads of {known} dimensions, not of {layer.mixer.head_dim}"
    if computed not in ("bf16", "fp16"):
        return f"it computes in bf16 and fp16, not in {computed}"
    if kv != computed:
        return f"it reads a KV cache in the precision computed in ({computed}) here, not {kv}"
    try:
        version = str(importlib.import_module("flashinfer").__version__)
    except Exception as error:  # whatever a broken installation raises
        return f"the package does not import ({type(error).__name__}: {error})"
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        return f"version {version} is too old, {OLDEST[0]}.{OLDEST[1]} or later is needed (pip install -U {PACKAGE})"
    return None


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that share a plan: one cache group, one set of rules."""

    group: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None


def kinds_of(spec: ModelSpec, layout: CacheLayout) -> list[Kind]:
    """The kind of each layer."""
    return [
        Kind(
            layout.place(i)[0],
            a.num_heads,
            a.num_kv_heads,
            a.head_dim,
            a.head_dim**-0.5 if a.scale is None else a.scale,
            a.window,
            a.softcap,
        )
        for i, a in enumerate(layer.mixer for layer in spec.layers)
    ]


def split_bytes(spec: ModelSpec, rows: int, sms: int) -> int:
    """Bytes of the buffer for parts of split contexts: what the package's planner asks for at most.

    It cuts contexts until two programs per multiprocessor are busy, in tiles of 16 to 128 rows (queries times heads of a KV
    head); a captured step of `rows` sequences holds that many tiles at least.
    """
    most = 0
    for a in {layer.mixer for layer in spec.layers}:
        group = a.num_heads // a.num_kv_heads
        fitting = 2 * sms // a.num_kv_heads
        tile = 16 if group <= 16 else 64 if group <= 64 else 128
        captured = max(fitting, -(-rows * group // tile) + rows) * tile
        most = max(most, 4 * a.num_heads * max(captured, fitting * 128) * (a.head_dim + 1))
    return most + MIB


def workspace_bytes(spec: ModelSpec, rows: int, sms: int) -> int:
    """Bytes that flashinfer's buffers take on the device beside the pool."""
    kinds = len(set(kinds_of(spec, cache_layout(spec, "bf16", 16))))
    return split_bytes(spec, rows, sms) + (2 * kinds + 1) * INT_WORKSPACE_BYTES


@dataclass(frozen=True, slots=True)
class Planned:
    """One step's attention: `decode_rows` rows of one token each come first, then the prompts' rows."""

    kinds: Sequence[Kind]
    decode_rows: int
    decode: dict[Kind, Any]
    prompts: dict[Kind, Any]

    def run(self, layer: int, qkv: torch.Tensor, out: torch.Tensor, kv: torch.Tensor) -> None:
        """Attention of one layer: `qkv` [rows, (heads + 2 kv_heads) * dim] and `kv` as our kernels take them."""
        kind, n = self.kinds[layer], self.decode_rows
        q = qkv[:, : kind.num_heads * kind.head_dim].unflatten(1, (kind.num_heads, kind.head_dim))
        out = out.view(q.shape)
        # Its kernels must not begin before ours have ended: they know nothing of the order that ours keep.
        if n:
            self.decode[kind].run(q[:n], kv, out=out[:n], enable_pdl=False)
        if n < len(q):
            self.prompts[kind].run(q[n:], kv, out=out[n:], enable_pdl=False)


class FlashInfer:
    """Plans steps. Compiles flashinfer's kernels when it is made, which takes minutes the first time on a machine.

    With `graphs`, decode steps of each padded size have wrappers of their own, whose launches may be captured.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: CacheLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rows: int,
        sms: int,
        blocks: int,
        graphs: bool,
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._package = importlib.import_module("flashinfer")
        self.version = str(self._package.__version__)
        self._kinds = kinds_of(spec, layout)
        self._distinct = list(dict.fromkeys(self._kinds))
        self._block_tokens = layout.block_tokens
        self._dtype = dtype
        self._device = device
        self._graphs = graphs
        self._split = torch.zeros(split_bytes(spec, rows, sms), dtype=torch.uint8, device=device)
        self._ints = {k: torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device) for k in self._distinct}
        self._indices = {k: torch.zeros(rows * blocks, dtype=torch.int32, device=device) for k in self._distinct}
        self._captured: dict[tuple[Kind, int], Any] = {}
        self._prompts = {
            k: self._package.BatchPrefillWithPagedKVCacheWrapper(self._split, "HND") for k in self._distinct
        }
        self._decode = {k: self._decode_wrapper(k) for k in self._distinct}
        self._planned = torch.cuda.Event() if device.type == "cuda" else None
        self._build()

    def decode(self, rows: int, slots: Ints, positions: Ints, tables: npt.NDArray[np.int32]) -> Planned:
        """Plan one token of each of `slots` at its position, padded to `rows`; `tables` [groups, slots, blocks]."""
        self._await_copies()
        wrappers = {
            k: self._plan_decode(self._captured_wrapper(k, rows) if self._graphs else self._decode[k], k, rows, slots,
                                 positions, tables)
            for k in self._distinct
        }  # fmt: skip
        self._mark_copies()
        return Planned(self._kinds, rows, wrappers, {})

    def mixed(
        self, slots: Ints, positions: Ints, long_slots: Ints, starts: Ints, lengths: Ints, tables: npt.NDArray[np.int32]
    ) -> Planned:
        """Plan rows of one token and, behind them, chunks of `lengths` tokens that begin at the positions `starts`."""
        self._await_copies()
        decode = {}
        if len(slots):
            n, decode = len(slots), self._decode
            decode = {k: self._plan_decode(w, k, n, slots, positions, tables) for k, w in decode.items()}
        for kind in self._distinct:
            indptr, indices, last, lens = self._pages(kind, long_slots, starts, starts + lengths, tables)
            firsts = np.concatenate([[0], np.cumsum(lengths)])
            self._prompts[kind].plan(
                self._host(firsts), self._host(indptr), self._sent(indices), self._host(last), kind.num_heads,
                kind.num_kv_heads, kind.head_dim, self._block_tokens, causal=True, seq_lens=self._host(lens),
                **self._rules(kind),
            )  # fmt: skip
        self._mark_copies()
        return Planned(self._kinds, len(slots), decode, self._prompts)

    def _plan_decode(
        self, wrapper: Any, kind: Kind, rows: int, slots: Ints, positions: Ints, tables: npt.NDArray[np.int32]
    ) -> Any:
        indptr, indices, last, lens = self._pages(kind, slots, positions, positions + 1, tables)
        # A padded row sees one token of block 0, whatever it is: its result goes nowhere.
        pad = rows - len(slots)
        indptr = np.concatenate([indptr, indptr[-1] + 1 + np.arange(pad)])
        indices, last, lens = (np.concatenate([a, np.full(pad, v)]) for a, v in ((indices, 0), (last, 1), (lens, 1)))
        wrapper.plan(
            self._host(indptr), self._sent(indices), self._host(last), kind.num_heads, kind.num_kv_heads,
            kind.head_dim, self._block_tokens, seq_lens=self._host(lens), **self._rules(kind),
        )  # fmt: skip
        return wrapper

    def _rules(self, kind: Kind) -> dict[str, Any]:
        return {
            # Theirs counts the tokens before a query, ours the query's own as well.
            "window_left": -1 if kind.window is None else kind.window - 1,
            "logits_soft_cap": kind.softcap,
            "sm_scale": kind.scale,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }

    def _pages(
        self, kind: Kind, slots: Ints, starts: Ints, ends: Ints, tables: npt.NDArray[np.int32]
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """Per sequence its pages as (indptr, indices, tokens on the last one, tokens): blocks behind the window left out."""
        size = self._block_tokens
        first = 0 * starts if kind.window is None else np.maximum(0, starts - kind.window + 1) // size
        counts = -(-ends // size) - first
        indptr = np.concatenate([[0], np.cumsum(counts)])
        owner = np.repeat(np.arange(len(slots)), counts)
        indices = tables[kind.group][slots[owner], np.arange(int(indptr[-1])) - indptr[owner] + first[owner]]
        lens = ends - first * size
        return indptr, indices, lens - (counts - 1) * size, lens

    def _decode_wrapper(self, kind: Kind, **buffers: torch.Tensor) -> Any:
        made = self._package.BatchDecodeWithPagedKVCacheWrapper(
            self._split, "HND", use_cuda_graph=bool(buffers), use_tensor_cores=True, **buffers
        )
        # Plans of different sizes never live at the same time, so that one piece of device memory serves them all.
        made.reset_workspace_buffer(self._split, self._ints[kind])
        return made

    def _captured_wrapper(self, kind: Kind, rows: int) -> Any:
        if (made := self._captured.get((kind, rows))) is None:
            integers = torch.zeros(2, rows + 1, dtype=torch.int32, device=self._device)
            made = self._captured[kind, rows] = self._decode_wrapper(
                kind,
                paged_kv_indptr_buffer=integers[0],
                paged_kv_indices_buffer=self._indices[kind],
                paged_kv_last_page_len_buffer=integers[1, :rows],
            )
        return made

    def _build(self) -> None:
        """Plan a token of every kind, which compiles and loads the kernels, those of different kinds side by side."""
        none, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        tables = np.zeros((1 + max(k.group for k in self._distinct), 1, 1), np.int32)

        def prompts(kind: Kind) -> None:
            self._prompts[kind].plan(
                self._host(np.arange(2)), self._host(np.arange(2)), self._sent(none), self._host(one), kind.num_heads,
                kind.num_kv_heads, kind.head_dim, self._block_tokens, causal=True, **self._rules(kind),
            )  # fmt: skip

        def job(work: tuple[Any, Kind]) -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            work[0](work[1])

        jobs = [(prompts, k) for k in self._distinct]
        jobs += [(lambda k: self._plan_decode(self._decode[k], k, 1, none, none, tables), k) for k in self._distinct]
        try:
            with ThreadPoolExecutor(len(jobs), thread_name_prefix="flashinfer") as pool:
                list(pool.map(job, jobs))
        except Exception as error:  # a missing compiler, a failed compilation, a card that it does not know
            last = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise InvalidInput(
                f"flashinfer {self.version} could not make its kernels: {last}",
                field="attention",
                remedy="choose triton, or install CUDA's compiler (nvcc), which flashinfer compiles them with",
            ) from error

    def _await_copies(self) -> None:
        """Plans go to the device from pinned memory that the next plan overwrites."""
        if self._planned is not None:
            self._planned.synchronize()

    def _mark_copies(self) -> None:
        if self._planned is not None:
            self._planned.record()

    def _host(self, values: npt.NDArray[Any]) -> torch.Tensor:
        found = torch.from_numpy(values.astype(np.int32))
        return found.pin_memory() if self._device.type == "cuda" else found

    def _sent(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return self._host(values).to(self._device, non_blocking=True)
