"""When decode attention goes by bulk copies (`headrace.engine.kernels.decode_hopper`), and how its work is cut."""

from __future__ import annotations

import torch
import triton

from headrace.engine.kernels.decode import DecodeWorkspace
from headrace.engine.kernels.table import GemmTable
from headrace.spec.cache import CacheLayout
from headrace.spec.model import Attention

PAGE = 16
"""Tokens that the kernel takes at once."""
RING_BYTES = 200 << 10
"""Of shared memory on a multiprocessor, for the rings of all its programs."""
LINES_BYTES = 256
"""What a page's scales take of a ring."""
MOST_BYTES = 1 << 32
"""Of a layer's INT8 blocks: copies of scales count numbers of two bytes in 31 bits."""
CODED = ("fp8", "int8")
"""Formats of keys and values that the kernel reads beside those computed in."""
MOST_PAGES = 12
"""Pages of a ring beyond which nothing becomes faster."""
LEAST_PAGES, MANY_ROWS, LEAST_OF_MANY = 8, 32, 64
"""Pages that are worth a program of their own; with many rows, which fill the card by themselves, only long contexts are cut."""


class BulkDecode:
    """The kernel for those layers of a model that it can serve; `why_not` says why there are none."""

    def __init__(
        self,
        mixers: list[Attention],
        layout: CacheLayout,
        num_blocks: int,
        table: GemmTable,
        dtype: torch.dtype,
        device: torch.device,
        *,
        sms: int,
        capability: tuple[int, int],
    ) -> None:
        self._table, self._sms = table, sms
        self._dim, self._kv_heads = layout.head_dim, layout.num_kv_heads
        self._code = layout.kv_precision if layout.kv_precision in CODED else ""
        self._plain = [_plain(a) and a.num_kv_heads == layout.num_kv_heads for a in mixers]
        self.why_not = self._unfit(mixers, layout, num_blocks, dtype, device, capability)

    def _unfit(self, mixers, layout, num_blocks, dtype, device, capability) -> str | None:
        if device.type != "cuda":
            return "the interpreter cannot run it"
        try:
            from headrace.engine.kernels import decode_hopper
        except (ImportError, AttributeError) as e:
            return f"this Triton has no Gluon for Hopper cards ({e})"
        self._kernel = decode_hopper.decode_hopper
        plain = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
        if layout.kv_precision not in (plain, *CODED):
            return f"keys and values are {layout.kv_precision}"
        of_a_layer = num_blocks * layout.bytes_per_block // layout.layers_per_group
        if layout.kv_precision == "int8" and of_a_layer > MOST_BYTES:
            return f"{num_blocks} blocks are more than the places of their scales can number"
        if not any(self._plain):
            return "all layers have windows, soft caps, sinks, shared keys or rotations of a part of a head"
        group = max(a.num_heads // a.num_kv_heads for a in mixers)
        return decode_hopper.fits(capability, dtype, layout.head_dim, group, layout.block_tokens)

    def note(self) -> str:
        """Which layers it serves, for the notes of the start."""
        if self.why_not is not None:
            return f"plain loads, since {self.why_not}"
        served, layers = sum(self._plain), len(self._plain)
        others = "" if served == layers else f" in {served} of {layers} layers, plain loads in the others"
        return f"bulk copies (Hopper){others}"

    def serves(self, layer: int) -> bool:
        return self.why_not is None and self._plain[layer]

    def shape(self, rows: int) -> dict[str, int]:
        """Warps, stages, pages of a warp's step, splits and the least pages to a program, of a step of so many rows."""
        tuned = self._table.bulk_decode(rows, self._dim, self._code)
        if tuned is not None:
            rest = {"pages": 1} | {k: v for k, v in tuned.items() if k != "programs"}
            return rest | {"splits": max(1, tuned["programs"] // rows)}
        # All programs on the card at once, so that none begins late, and rings as deep as that leaves room for.
        heads = rows * self._kv_heads
        splits = max(1, (4 if self._code else 2) * self._sms // heads)
        page_bytes = (2 if self._code else 4) * PAGE * self._dim + (LINES_BYTES if self._code == "int8" else 0)
        room = min(MOST_PAGES, RING_BYTES // (triton.cdiv(heads * splits, self._sms) * page_bytes))
        if self._code:
            shape = {"warps": 1, "stages": max(2, room // 2), "pages": 2}
        else:
            warps = 2 if room >= MOST_PAGES else 1
            shape = {"warps": warps, "stages": max(3, room // warps), "pages": 1}
        if rows <= MANY_ROWS:
            return shape | {"splits": splits, "least": LEAST_PAGES}
        return shape | {"splits": max(splits, 4), "least": LEAST_OF_MANY}

    def splits(self, rows: int) -> int:
        """Parts that need room in the workspace."""
        return self.shape(rows)["splits"] if self.why_not is None else 1

    def compiled(self, rows: int) -> tuple[int, ...]:
        """What tells the kernels of steps of so many rows from those of other sizes."""
        if self.why_not is not None:
            return ()
        shape = self.shape(rows)
        return shape["warps"], shape["stages"], shape["pages"]

    def run(
        self, qkv, out, kv, tables, slots, positions, work: DecodeWorkspace, heads: int, *, pdl: bool, **given
    ) -> None:
        """`decode_attention` of a layer that this serves."""
        self._kernel(qkv, out, kv, tables, slots, positions, work, heads, pdl=pdl, **self.shape(len(slots)), **given)


def _plain(a: Attention) -> bool:
    usual = a.window is None and a.softcap is None and not a.sinks and a.kv_source is None
    return usual and (a.rope is None or a.rope.dim == a.head_dim)
