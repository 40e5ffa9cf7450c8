"""The decoder on the device: which kernels a step launches, in which order, on which persistent buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import msgspec
import numpy as np
import torch
import triton

from headrace.engine.backend import Limits
from headrace.engine.cuda.bulk_decode import BulkDecode
from headrace.engine.cuda.flashinfer import FlashInfer, Planned
from headrace.engine.cuda.library import Library
from headrace.engine.cuda.pool import KVPool
from headrace.engine.cuda.products import ROWWISE_ROWS, Matrix, Products
from headrace.engine.cuda.staged import StagedKeys
from headrace.engine.cuda.weights import DecoderWeights, LayerWeights
from headrace.engine.frequencies import frequencies
from headrace.engine.kernels.activation import activate, activate_rounded
from headrace.engine.kernels.blocks import gather_rows
from headrace.engine.kernels.decode import DecodeWorkspace, decode_attention
from headrace.engine.kernels.embed import embed
from headrace.engine.kernels.gemm import (
    MAX_ROWS,
    PART_ROWS,
    Gained,
    GemmConfig,
    GemmWorkspace,
    why_not_specialized,
)
from headrace.engine.kernels.groups import code_groups, stage_keys
from headrace.engine.kernels.norm import FEW_ROWS, add_norm
from headrace.engine.kernels.prefill import HOPPER_TILE, PrefillWorkspace, prefill_attention
from headrace.engine.kernels.prefill_groups import prefill_groups
from headrace.engine.kernels.rope import rope_cache
from headrace.engine.kernels.rounding import Rounded
from headrace.engine.kernels.table import BUCKETS, GemmTable
from headrace.spec.cache import CacheLayout
from headrace.spec.model import Attention, ModelSpec, Rope

PREFIX_SPLITS = 4
PREFIX_SHAPE = {"prefix_block_n": 64, "prefix_warps": 4, "prefix_stages": 3, "prefix_chunk": 64}
CODED_PREFIX_SHAPE = {"prefix_block_n": 128, "prefix_warps": 4, "prefix_stages": 2, "prefix_chunk": 64}
"""The same for keys and values of 8 bits."""
PREFIX_ROTATES = True
"""Whether shared-prefix attention rotates queries itself instead of a kernel before it."""
OWN_SPLITS = 2
"""Parts of what a row has beside its shared prefix; all programs should be on the card at once."""
OWN_SHAPE = {"block_n": 16, "num_warps": 1, "stages": 3}
CODED_OWN_SHAPE = {"block_n": 32, "num_warps": 1, "stages": 3}
SHORT_TILE = 64
"""Queries of a prompt tile in steps with few prompt tokens; their cached keys may be cut among programs."""
SPLIT_TILES, PREFILL_SPLITS = 8, 4
ADDED_ROWS = 1024
"""From so many rows on a product adds to the residual stream itself; for fewer, the library's kernels that add are slower."""
MOST_PARTS, PART_TOKENS = 4, 1024
"""Most parts of a tile's cached keys in the warp-specialized kernel, and the fewest keys that are worth one."""
GATHERERS = 8
"""Programs on each multiprocessor that gather cached keys."""
PACKED_ROWS = 64
"""Rows (queries times heads of a KV head) in a tile of shared-prefix attention."""


@dataclass(slots=True)
class DeviceStep:
    """Where one step's indices lie on the device, all int32. Rows: first `decode_rows` of one token each, then chunks.

    Per row: `ids` (negative: the slot's last sampled id), `slots` (-1: padding), `positions`. `chunks` [n, 4] and `tiles`
    [t, 2] as `prefill_attention` takes them. `firsts`, `prefix_tiles`: shared prefixes of the decode rows. `picked`: rows
    whose logits are wanted; None means all of them. `offsets` [n]: the tiles are for the warp-specialized kernel, and there the
    cached keys of chunk i are gathered from row `offsets[i]` on, `gathered` [1] rows in all (None: there are none). `counts` [2]:
    how many of the tiles count and the parts their cached keys are cut into, where a captured step serves many. `keep_all`: the
    last hidden states of all rows are wanted in `x`; else the last layer goes on with the picked rows only after its attention,
    which then needs no other tiles than `last_tiles` and, where `last_rows` names spans of rows, no other queries. `planned`:
    attention of another package, which needs none of the above.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    decode_rows: int
    chunks: torch.Tensor | None = None
    tiles: torch.Tensor | None = None
    tile_rows: int = 128
    firsts: torch.Tensor | None = None
    prefix_tiles: torch.Tensor | None = None
    picked: torch.Tensor | None = None
    keep_all: bool = False
    last_tiles: torch.Tensor | None = None
    last_rows: list[tuple[int, int]] | None = None
    offsets: torch.Tensor | None = None
    gathered: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    planned: Planned | None = None


class Decoder:
    """Runs one model's layers; every method only launches work on the current stream."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        layout: CacheLayout,
        limits: Limits,
        table: GemmTable,
        dtype: torch.dtype,
        device: torch.device,
        *,
        sms: int,
        pdl: bool,
        capability: tuple[int, int],
    ) -> None:
        self.planner: FlashInfer | None = None
        """Plans each step's attention where another package computes it."""
        self._spec = spec
        self._mixers = [layer.mixer for layer in spec.layers]
        self._weights = weights
        self._table = table
        self._sms = sms
        self._pdl = pdl
        self._eps = spec.norm_eps
        self.tokens = limits.max_batched_tokens
        self.rows = min(limits.max_num_seqs, self.tokens)
        hidden = spec.hidden_size
        attention = max(self._qkv_width(a) + a.num_heads * a.head_dim for a in self._mixers)
        mlp = max(self._up_width(layer) + layer.mlp.intermediate for layer in spec.layers)

        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.x = empty(self.tokens, hidden)
        self._h = empty(self.tokens, hidden)
        # Projections and MLP never live at the same time: one piece of memory serves both.
        self._wide = empty(self.tokens * max(attention, mlp))
        self.logits = empty(self.rows, spec.vocab_size, dtype=torch.float32)
        self.picked_x = empty(self.rows, hidden)
        self.pool = KVPool(layout, limits.num_blocks, device)
        self._kv_format = layout.kv_precision
        self.staged = StagedKeys(layout, limits, spec.num_layers, dtype, device) if layout.whole_blocks else None
        """Keys of unfinished groups, where the cache's format has such; prompts then come in tiles of `SHORT_TILE` only."""
        blocks = -(-(limits.max_model_len + 1) // layout.block_tokens)
        self.tables = torch.full((layout.num_groups, limits.max_num_seqs, blocks), -1, dtype=torch.int32, device=device)
        self.last_ids = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)
        self._places = [layout.place(i) for i in range(spec.num_layers)]
        self._some = self._one_of_each_kind()
        ropes = list(dict.fromkeys(a.rope for a in self._mixers if a.rope is not None))
        self._turns = {r: rotation_rows(r, limits.max_model_len, device) for r in ropes}
        self._no_turn = torch.zeros(limits.max_model_len, 2, device=device)
        self.bulk = BulkDecode(
            self._mixers, layout, limits.num_blocks, table, dtype, device, sms=sms, capability=capability
        )
        group = max(a.num_heads // a.num_kv_heads for a in self._mixers)
        self._work = DecodeWorkspace(
            self.rows,
            layout.num_kv_heads,
            group,
            layout.head_dim,
            lambda n: max(self.splits(n), self.bulk.splits(n), OWN_SPLITS + PREFIX_SPLITS),
            device,
        )
        self._prefill_work = PrefillWorkspace(
            SPLIT_TILES, PREFILL_SPLITS, max(a.num_heads for a in self._mixers), SHORT_TILE, layout.head_dim, device
        )
        plain = all(a.window is None and a.softcap is None for a in self._mixers)
        self.why_not_hopper = "the interpreter cannot run it"
        if device.type == "cuda":
            from headrace.engine.kernels import prefill_hopper

            self._hopper = prefill_hopper
            self.why_not_hopper = prefill_hopper.fits(capability, dtype, layout.head_dim, plain)
        if self.staged is not None:
            self.why_not_hopper = "keys of 4 bits have tiles of their own"
        # Keys of earlier steps as the warp-specialized kernel reads them: room for one sequence of the greatest length.
        self.gathered_rows = 0
        if self.why_not_hopper is None:
            self.gathered_rows = max(8192, triton.cdiv(limits.max_model_len, HOPPER_TILE) * HOPPER_TILE)
            self._gathered = empty(self.gathered_rows, 2 * layout.num_kv_heads * layout.head_dim)
            self._parts = self._hopper.Parts(sms, layout.head_dim, device)
        widest = max(max(len(w.qkv), len(w.up), hidden) for w in weights.layers)
        programs = sms if why_not_specialized(capability, dtype) is None else 0
        self._gemm = GemmWorkspace(PART_ROWS * max(widest, 1), max(widest, spec.vocab_size) // 16 + 1, device, programs)
        self._products = Products(
            weights.matrices(), table, self._gemm, self.tokens, dtype, device, capability=capability, pdl=pdl
        )
        self.library = Library(table.library, dtype, device)
        # Sums of products that come in parts, of which there are few rows.
        self._parts_of_sums = empty(self._most_parts(), hidden)
        self._squares = torch.empty(2, triton.cdiv(hidden, 16), MAX_ROWS.value, dtype=torch.float32, device=device)
        # Fused products need the plain pre-norm block.
        self._fusable = all(layer.num_norms == 2 and layer.mlp.gated for layer in spec.layers)

    def _one_of_each_kind(self) -> list[int]:
        """Layers that between them launch every version of a kernel that any layer does; pointers' alignment makes versions, too."""
        layers = range(self._spec.num_layers)
        if not all(isinstance(m, torch.Tensor) for m in self._weights.matrices()):
            return list(layers)
        first: dict[tuple[object, ...], int] = {}
        for i in layers:
            layer, w = self._spec.layers[i], self._weights.layers[i]
            staged = None if self.staged is None else self.staged.layers[i]
            own = (getattr(w, field.name) for field in fields(w))
            # The last product of a layer may take the next one's norm.
            held = [*own, self._norm_after(i), *self.pool.layer(self._places[i][1]), staged]
            aligned = [None if t is None else t.data_ptr() % 16 for t in held]
            first.setdefault((self._places[i][0], layer.mixer, layer.mlp, layer.num_norms, *aligned), i)
        return sorted({*first.values(), layers[-1]})

    def _norm_after(self, i: int) -> torch.Tensor:
        """The norm that what layer i leaves goes through first."""
        layers = self._weights.layers
        return layers[i + 1].attn_norm if i + 1 < len(layers) else self._weights.final_norm

    @staticmethod
    def _qkv_width(a: Attention) -> int:
        return (a.num_heads + 2 * a.num_kv_heads) * a.head_dim

    @staticmethod
    def _up_width(layer) -> int:
        return layer.mlp.intermediate * (2 if layer.mlp.gated else 1)

    @property
    def activation_bytes(self) -> int:
        """Bytes of the persistent step buffers (the KV pool and its tables left out)."""
        return sum(t.nbytes for t in (self.x, self._h, self._wide))

    @property
    def workspace_bytes(self) -> int:
        """Bytes of split-work buffers, rotation tables and block tables."""
        turns = sum(t.nbytes for t in self._turns.values()) + self._no_turn.nbytes
        turns += self._gathered.nbytes + self._parts.nbytes if self.gathered_rows else 0
        return (
            self._work.nbytes
            + self._prefill_work.nbytes
            + self._gemm.nbytes
            + self._parts_of_sums.nbytes
            + self.library.nbytes
            + self._products.nbytes
            + turns
            + self.tables.nbytes
            + self.last_ids.nbytes
        )

    def _most_parts(self) -> int:
        """Rows times parts of products that come in parts, at most."""
        weights = [w for layer in self._weights.layers for w in (layer.out, layer.down) if isinstance(w, torch.Tensor)]
        return max(
            (
                min(rows, self.tokens) * parts
                for shape in {w.shape for w in weights}
                for rows, parts in self.library.in_parts(*shape)
            ),
            default=0,
        )

    def parts(self, tiles: int, least_cached: int) -> int:
        """Parts that the warp-specialized kernel should cut the cached keys of each tile into, where every chunk has
        `least_cached` or more: a program for each, and none too short."""
        heads = max(a.num_heads for a in self._mixers)
        return max(1, min(MOST_PARTS, self._sms // (tiles * heads), least_cached // PART_TOKENS))

    def splits(self, rows: int) -> int:
        """Parts that a context is cut into: enough programs for the card, fewer where there are many rows."""
        if (tuned := self._tuned_decode(rows)) is not None:
            return tuned["splits"]
        return int(min(33, max(4, -(-8 * self._sms // (rows * self._mixers[0].num_kv_heads)))))

    def _tuned_decode(self, rows: int) -> dict[str, int] | None:
        return self._table.decode(rows, self._mixers[0].head_dim, self._kv_format)

    @property
    def tuned_for_codes(self) -> bool:
        """Whether the card's table says how attention over the cache's own format is cut."""
        return self._table.has_decode(self._mixers[0].head_dim, self._kv_format)

    def _decode_shape(self, rows: int) -> dict[str, int]:
        tuned = self._tuned_decode(rows)
        # Keys that are coded in groups are read a group at a time.
        names = ("block_n", "num_warps", "stages") if self.staged is None else ("num_warps", "stages")
        return {} if tuned is None else {k: tuned[k] for k in names}

    def min_chunk(self, rows: int) -> int:
        """Keys that are worth a program of their own: with many rows only long contexts are cut, to even out the load."""
        if (tuned := self._tuned_decode(rows)) is not None:
            return tuned["min_chunk"]
        return 128 if rows <= 16 else 256 if rows <= 32 else 1024

    def fused(self, rows: int) -> bool:
        """Whether a step of so many rows takes the fused products."""
        return self._fusable and None not in self._fused_configs(rows)

    def _fused_configs(self, rows: int) -> list[GemmConfig | None]:
        w, config = self._weights.layers[0], self._products.config
        return [config(rows, w.qkv), config(rows, w.out), config(rows, w.up, pair=True), config(rows, w.down)]

    def specialized(self) -> str:
        """Which products are warp-specialized, for the notes of the start; if none is, why not."""
        if (why := self._products.why_not_specialized) is not None:
            return f"the library's, since {why}"
        sizes = {min(n, self.rows) for n in BUCKETS}
        found = [n for n in sorted(sizes) if self.fused(n) and self._fused_configs(n)[0].block_m]
        if not found:
            return "the library's, since no table has others for these shapes (headrace tune)"
        return f"warp-specialized in decode steps padded to {', '.join(map(str, found))} rows"

    def kernels_of(self, rows: int) -> tuple[object, ...]:
        """What tells the kernels of decode steps of so many rows from those of other sizes."""
        products: list[object] = []
        if self.fused(rows):
            products = list(self._fused_configs(rows))
        return (*products, self.head_config(rows), *self.decode_kernel(rows))

    def decode_kernel(self, rows: int) -> tuple[int, ...]:
        """What tells the kernels of decode attention of so many rows from those of other sizes."""
        plain = not all(self.bulk.serves(i) for i in range(len(self._mixers)))
        return (*(self._decode_shape(rows).values() if plain else ()), *self.bulk.compiled(rows))

    def greedy_pdl(self, rows: int, step: DeviceStep) -> bool:
        """Whether the choice after a decode step may be launched before the head has ended."""
        spec = self._spec
        plain = spec.logit_scale == 1.0 and spec.logit_softcap is None
        return self._pdl and plain and self.fused(rows) and self.head_config(rows) is not None and step.picked is None

    def run(
        self, step: DeviceStep, bad_rows: torch.Tensor | None = None, *, head: bool = True, some_layers: bool = False
    ) -> torch.Tensor | None:
        """Compute a step: keys and values into the pool, and fp32 logits of the picked rows, in a persistent buffer.

        `bad_rows` [rows] int32 gets 1 where a row's hidden state is not finite at the end, or where the last layer begins if
        only picked rows go through all of it. Without `head` no logits are made. `some_layers`: what comes out counts for nothing,
        so one of each kind will do, and the last.
        """
        if self.planner is not None and step.planned is None:
            raise RuntimeError("the step's attention was not planned")
        rows = len(step.ids)
        fused = step.decode_rows == rows and self.fused(rows)
        x = self.x[:rows]
        weights, scale = self._weights, self._embedding_scale()
        if fused:
            gained = Gained(self._h[:rows], self._squares[0])
            embed(
                step.ids, step.slots, self.last_ids, weights.embedding, x, scale, gain=weights.layers[0].attn_norm,
                gained=gained, pdl=self._pdl,
            )  # fmt: skip
            for i in self._some if some_layers else range(len(weights.layers)):
                self._fused_layer(i, x, gained, step)
            if step.picked is None and self.head_config(rows) is not None:
                return self._capped(self._skinny_head(gained, self.logits[:rows], pdl=self._pdl))
        else:
            embed(step.ids, step.slots, self.last_ids, weights.embedding, x, scale, pdl=self._pdl)
            pending, post = None, None
            last = len(weights.layers) - 1
            pruned = step.picked is not None and not step.keep_all
            for i in self._some if some_layers else range(len(weights.layers)):
                w = weights.layers[i]
                if i == last and pruned:
                    return self._last_layer(i, w, x, pending, post, step, bad_rows)
                pending, post = self._layer(i, w, x, pending, post, step)
            if pending is not None or bad_rows is not None:
                scale = self._spec.residual_scale
                add_norm(x, pending, None, None, self._eps, post_weight=post, scale=scale, bad=bad_rows, pdl=self._pdl)
        if not head:
            return None
        if step.picked is not None:
            picked = self.picked_x[: len(step.picked)]
            torch.index_select(x, 0, step.picked, out=picked)
            x = picked
        return self.head(x)

    def head(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Final norm and output head of hidden states [rows, hidden]; fp32 logits, by default in the persistent buffer."""
        rows = len(x)
        logits = self.logits[:rows] if out is None else out
        h = self._h[:rows]
        add_norm(x, None, self._weights.final_norm, h, self._eps, pdl=self._pdl)
        if self.head_config(rows) is not None:
            self._skinny_head(h, logits)
        else:
            product(h, self._weights.head, logits)
        return self._capped(logits)

    def head_config(self, rows: int) -> GemmConfig | None:
        """How the output head of so many rows is multiplied; None: by the library."""
        return self._products.config(rows, self._weights.head)

    def _skinny_head(self, x: torch.Tensor | Gained, logits: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
        config = self.head_config(len(logits))
        self._products.fused(x, self._weights.head, logits, config, eps=self._eps, pdl=pdl)
        return logits

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        if spec.logit_scale != 1.0:
            logits.mul_(spec.logit_scale)
        if (cap := spec.logit_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _embedding_scale(self) -> float:
        # Rounded to the weights' precision first, as the architectures that have one do.
        return float(torch.tensor(self._spec.embedding_scale, dtype=self.x.dtype))

    def _cut(self, offset: int, rows: int, width: int) -> torch.Tensor:
        return self._wide[offset : offset + rows * width].view(rows, width)

    def _linear(self, x: torch.Tensor | Rounded, w: Matrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        if not isinstance(w, torch.Tensor):
            self._products.linear(x, w, bias, out)
        elif bias is None and (chosen := self.library.find(x, w)) is not None:
            chosen.run(x, w, out)
        elif bias is None:
            torch.mm(x, w.t(), out=out)
        else:
            torch.addmm(bias, x, w.t(), out=out)

    def _summand(self, x: torch.Tensor, w: Matrix, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """x w' for `add_norm`: in `out`, or in parts where the product is faster that way."""
        if isinstance(w, torch.Tensor) and bias is None:
            chosen = self.library.find(x, w, parts=len(self._parts_of_sums) // len(x))
            if chosen is not None and chosen.parts > 1:
                parts = self._parts_of_sums[: chosen.parts * len(x)].view(chosen.parts, *out.shape)
                chosen.run(x, w, parts)
                return parts
        self._linear(x, w, bias, out)
        return out

    def _added(self, x: torch.Tensor, y: torch.Tensor, w: Matrix, scale: float) -> None:
        """x += scale * y w', the sum rounded once."""
        if not isinstance(w, torch.Tensor):
            self._products.added(x, y, w, scale)
            return
        if (chosen := self.library.find(y, w)) is not None:
            chosen.run(y, w, x, scale=scale, add=True)
            return
        torch.addmm(x, y, w.t(), alpha=scale, out=x)

    def _fused_layer(self, i: int, x: torch.Tensor, gained: Gained, step: DeviceStep) -> None:
        for part in self._fused_parts(i, x, gained, step):
            part()

    def _fused_parts(self, i: int, x: torch.Tensor, gained: Gained, step: DeviceStep) -> list[Callable[[], None]]:
        """The launches of one layer whose norms ride on the products.

        `gained` is x times the layer's first norm, and times the next layer's afterwards.
        """
        rows = len(x)
        w = self._weights.layers[i]
        following = self._norm_after(i)
        a = self._mixers[i]
        width, kind = self._up_width(self._spec.layers[i]) // 2, self._spec.layers[i].mlp.activation
        qkv = self._cut(0, rows, self._qkv_width(a))
        attended = self._cut(qkv.numel(), rows, a.num_heads * a.head_dim)
        activated = self._cut(0, rows, width)
        config = self._products.config
        eps, pdl, scale = self._eps, self._pdl, self._spec.residual_scale

        def gemm(x, weight, out, *, pair: bool = False, **more) -> None:
            chosen = config(rows, weight, pair=pair)
            self._products.fused(x, weight, out, chosen, pdl=pdl, pair=kind if pair else None, **more)

        between = Gained(gained.values, self._squares[1])
        added = {"residual": x, "scale": scale}
        return [
            lambda: gemm(gained, w.qkv, qkv, eps=eps, bias=w.qkv_bias),
            *self._attend_parts(i, a, w, qkv, attended, step, pdl=pdl),
            lambda: gemm(attended, w.out, x, bias=w.out_bias, gain=w.mlp_norm, gained=between, **added),
            lambda: gemm(between, w.up, activated, eps=eps, pair=True, bias=w.up_bias),
            lambda: gemm(activated, w.down, x, bias=w.down_bias, gain=following, gained=gained, **added),
        ]

    def _layer(self, i: int, w: LayerWeights, x, pending, post, step: DeviceStep):
        """One layer; returns what is still to be added to x, and the norm that it passes first, if any."""
        rows = len(x)
        a, mlp = self._mixers[i], self._spec.layers[i].mlp
        h = self._h[:rows]
        qkv = self._cut(0, rows, self._qkv_width(a))
        attended = self._cut(qkv.numel(), rows, a.num_heads * a.head_dim)
        up = self._cut(0, rows, len(w.up))
        activated = self._cut(up.numel(), rows, mlp.intermediate)
        scale = self._spec.residual_scale
        added = rows >= ADDED_ROWS
        # Where a product takes codes of 8 bits whoever makes its x leaves such; only attention does not.
        coded = self._products.rounding(w.qkv, rows)
        add_norm(x, pending, w.attn_norm, h, self._eps, post_weight=post, scale=scale, rounded=coded, pdl=self._pdl)
        self._linear(h if coded is None else coded, w.qkv, w.qkv_bias, qkv)
        self._attend(i, a, w, qkv, attended, step, pdl=self._pdl)
        coded = self._products.rounding(w.up, rows)
        if added and w.post_attn_norm is None and w.out_bias is None and self._products.adds(w.out, rows):
            self._added(x, attended, w.out, scale)
            add_norm(x, None, w.mlp_norm, h, self._eps, rounded=coded, pdl=self._pdl)
        else:
            y = self._summand(attended, w.out, w.out_bias, h)
            add_norm(
                x, y, w.mlp_norm, h, self._eps, post_weight=w.post_attn_norm, scale=scale, rounded=coded, pdl=self._pdl
            )
        self._linear(h if coded is None else coded, w.up, w.up_bias, up)
        if (coded := self._products.rounding(w.down, rows)) is not None:
            activate_rounded(up, coded, mlp.activation, gated=mlp.gated, pdl=self._pdl)
            self._linear(coded, w.down, w.down_bias, h)
            return h, w.post_mlp_norm
        activate(up, activated, mlp.activation, gated=mlp.gated, pdl=self._pdl)
        if added and w.post_mlp_norm is None and w.down_bias is None and self._products.adds(w.down, rows):
            self._added(x, activated, w.down, scale)
            return None, None
        return self._summand(activated, w.down, w.down_bias, h), w.post_mlp_norm

    def _last_layer(self, i: int, w: LayerWeights, x, pending, post, step: DeviceStep, bad_rows) -> torch.Tensor:
        """The last layer of a step with picked rows, and the head: keys and values of all rows, the rest for those picked."""
        rows, count = len(x), len(step.picked)
        a, mlp, scale = self._mixers[i], self._spec.layers[i].mlp, self._spec.residual_scale
        h = self._h[:rows]
        qkv = self._cut(0, rows, self._qkv_width(a))
        attended = self._cut(qkv.numel(), rows, a.num_heads * a.head_dim)
        add_norm(x, pending, w.attn_norm, h, self._eps, post_weight=post, scale=scale, bad=bad_rows, pdl=self._pdl)
        if step.last_rows is None or w.qkv_bias is not None or not isinstance(w.qkv, torch.Tensor):
            self._linear(h, w.qkv, w.qkv_bias, qkv)
        else:
            # Other queries stay what the buffer held: they are rotated like these, but nobody reads them.
            queries = a.num_heads * a.head_dim
            torch.mm(h, w.qkv[queries:].t(), out=qkv[:, queries:])
            for begin, end in step.last_rows:
                torch.mm(h[begin:end], w.qkv[:queries].t(), out=qkv[begin:end, :queries])
        last = step if step.last_tiles is None else replace(step, tiles=step.last_tiles)
        self._attend(i, a, w, qkv, attended, last, pdl=self._pdl)
        picked, chosen = self.picked_x[:count], self._cut(0, count, a.num_heads * a.head_dim)
        torch.index_select(x, 0, step.picked, out=picked)
        torch.index_select(attended, 0, step.picked, out=chosen)
        h = self._h[:count]
        y = self._summand(chosen, w.out, w.out_bias, h)
        add_norm(picked, y, w.mlp_norm, h, self._eps, post_weight=w.post_attn_norm, scale=scale, pdl=self._pdl)
        up = self._cut(0, count, len(w.up))
        activated = self._cut(up.numel(), count, mlp.intermediate)
        self._linear(h, w.up, w.up_bias, up)
        activate(up, activated, mlp.activation, gated=mlp.gated, pdl=self._pdl)
        y = self._summand(activated, w.down, w.down_bias, h)
        add_norm(picked, y, None, None, self._eps, post_weight=w.post_mlp_norm, scale=scale, pdl=self._pdl)
        return self.head(picked)

    def _attend(self, i: int, a: Attention, w: LayerWeights, qkv, out, step: DeviceStep, *, pdl: bool) -> None:
        for part in self._attend_parts(i, a, w, qkv, out, step, pdl=pdl):
            part()

    def _attend_parts(
        self, i: int, a: Attention, w: LayerWeights, qkv, out, step: DeviceStep, *, pdl: bool
    ) -> list[Callable[[], None]]:
        group, place = self._places[i]
        (kv, scales), tables = self.pool.layer(place), self.tables[group]
        turn = self._no_turn if a.rope is None else self._turns[a.rope]
        rope_dim = 0 if a.rope is None else a.rope.dim
        norms = {"q_norm": w.q_norm, "k_norm": w.k_norm, "eps": self._eps}
        rules = {
            "scale": a.head_dim**-0.5 if a.scale is None else a.scale,
            "window": a.window,
            "softcap": a.softcap,
        }
        n, rows = step.decode_rows, len(qkv)
        cascade = step.prefix_tiles is not None and a.window is None
        # Without prompts the decode kernel itself rotates and stores.
        alone = n == rows and (PREFIX_ROTATES or not cascade) and self.planner is None and self.staged is None
        parts: list[Callable[[], None]] = []
        if not alone:
            parts.append(
                lambda: rope_cache(
                    qkv,
                    kv,
                    tables,
                    step.slots,
                    step.positions,
                    turn,
                    a.num_heads,
                    rope_dim=rope_dim,
                    scales=scales,
                    pdl=pdl,
                    **norms,
                )
            )
        staged = None if self.staged is None else self.staged.layers[i]
        if staged is not None:
            parts.append(lambda: code_groups(
                qkv, kv, scales, staged, tables, step.slots, step.positions, a.num_heads
            ))  # fmt: skip
        if self.planner is not None:
            if (planned := step.planned) is not None:
                parts.append(lambda: planned.run(i, qkv, out, kv))
            return parts
        given = {"cos_sin": turn, "rope_dim": rope_dim, **norms} if alone else {}
        if n and not cascade and self.bulk.serves(i):
            parts.append(lambda: self.bulk.run(
                qkv[:n], out[:n], kv, tables, step.slots[:n], step.positions[:n], self._work, a.num_heads,
                scale=rules["scale"], scales=scales, pdl=pdl and n == rows, **given,
            ))  # fmt: skip
        elif n:
            if cascade:
                given |= {"firsts": step.firsts, "tiles": step.prefix_tiles, "prefix_splits": PREFIX_SPLITS}
                coded = kv.dtype == torch.int16
                given |= (CODED_PREFIX_SHAPE | CODED_OWN_SHAPE) if coded else (PREFIX_SHAPE | OWN_SHAPE)
                given |= {"splits": OWN_SPLITS, "min_chunk": 1024}
            else:
                given |= {"splits": self.splits(n), "min_chunk": self.min_chunk(n), **self._decode_shape(n)}
            parts.append(lambda: decode_attention(
                qkv[:n], out[:n], kv, tables, step.slots[:n], step.positions[:n], self._work, a.num_heads,
                scales=scales, staged=staged, pdl=pdl and n == rows, **rules, **given,
            ))  # fmt: skip
        if step.chunks is not None and staged is not None:
            parts.append(lambda: prefill_groups(
                qkv, out, kv, scales, staged, tables, step.chunks, step.tiles, a.num_heads, block_m=step.tile_rows, **rules,
            ))  # fmt: skip
            parts.append(lambda: stage_keys(qkv, staged, step.slots, step.positions, a.num_heads))
        elif step.chunks is not None and step.offsets is not None:
            if step.gathered is not None:
                parts.append(lambda: gather_rows(
                    kv, tables, step.chunks, step.offsets, step.gathered, self._gathered, programs=GATHERERS * self._sms,
                    scales=scales,
                ))  # fmt: skip
            parts.append(lambda: self._hopper.prefill_hopper(
                qkv, out, self._gathered, step.chunks, step.tiles, step.offsets, a.num_heads, a.num_kv_heads,
                scale=rules["scale"], programs=self._sms, counts=step.counts, work=self._parts,
            ))  # fmt: skip
        elif step.chunks is not None:
            work = self._prefill_work if step.tile_rows == SHORT_TILE else None
            parts.append(lambda: prefill_attention(
                qkv, out, kv, tables, step.chunks, step.tiles, a.num_heads, work=work, scales=scales, **rules,
                **prefill_shape(step.tile_rows, a),
            ))  # fmt: skip
        return parts

    def decode_jobs(self, step: DeviceStep) -> list[Callable[[], None]]:
        """`compile_jobs` of nothing but the decode attention of steps with prompts."""
        kinds = {msgspec.structs.replace(a, kv_source=None): i for i, a in enumerate(self._mixers)}
        # Behind the rotation and the codes of groups, before what prompts take.
        at = 1 if self.staged is None else 2
        return [self._attention_jobs(i, step)[at] for i in kinds.values()]

    def _attention_jobs(self, i: int, step: DeviceStep) -> list[Callable[[], None]]:
        """The launches of a layer's attention, over whatever the buffers hold."""
        a, rows = self._mixers[i], len(step.ids)
        qkv = self._cut(0, rows, self._qkv_width(a))
        out = self._cut(qkv.numel(), rows, a.num_heads * a.head_dim)
        return self._attend_parts(i, a, self._weights.layers[i], qkv, out, step, pdl=self._pdl)

    def compile_jobs(
        self, step: DeviceStep, *, attention: bool = True, others: bool = True
    ) -> list[Callable[[], None]]:
        """Launches that, run in any order on a step of nothing but padding, compile every kernel that such steps launch.

        One for each kind of layer; results are meaningless. Without `attention` or `others` that is launched by another step.
        """
        rows, weights = len(step.ids), self._weights
        x, h = self.x[:rows], self._h[:rows]
        gained = Gained(h, self._squares[0], 1)
        seen, jobs = set(), []
        for i, layer in enumerate(self._spec.layers):
            if (kind := (msgspec.structs.replace(layer.mixer, kv_source=None), layer.mlp)) in seen:
                continue
            seen.add(kind)
            if step.decode_rows == rows and self.fused(rows) and others:
                product, *attending, out, up, down = self._fused_parts(i, x, gained, step)
                jobs += [product, *(attending if attention else ()), out, up, down]
                continue
            if attention:
                jobs += self._attention_jobs(i, step)
        if not others:
            return jobs
        if self.fused(rows) and step.decode_rows == rows:
            jobs.append(
                lambda: embed(
                    step.ids,
                    step.slots,
                    self.last_ids,
                    weights.embedding,
                    x,
                    1.0,
                    gain=weights.layers[0].attn_norm,
                    gained=gained,
                    pdl=self._pdl,
                )
            )
            if self.head_config(rows) is not None:
                jobs.append(lambda: self._skinny_head(gained, self.logits[:rows], pdl=self._pdl))
            return jobs
        w, mlp, pdl = weights.layers[0], self._spec.layers[0].mlp, self._pdl
        up = self._cut(0, rows, len(w.up))
        for matrix in (w.qkv, w.out, w.up, w.down):
            if not isinstance(matrix, torch.Tensor):
                jobs += [lambda n=n, m=matrix: self._some_product(n, m) for n in self._ways(matrix)]
        if (coded := self._products.rounding(w.down, rows)) is not None:
            jobs.append(lambda: activate_rounded(up, coded, mlp.activation, gated=mlp.gated, pdl=pdl))
        jobs.append(lambda: embed(step.ids, step.slots, self.last_ids, weights.embedding, x, 1.0, pdl=pdl))
        # Few rows and many have kernels of their own.
        for n in {min(FEW_ROWS, self.tokens), min(FEW_ROWS + 1, self.tokens)}:
            jobs += self._norm_jobs(w, self.x[:n], self._h[:n])
        jobs += [
            lambda: activate(
                up, self._cut(up.numel(), rows, mlp.intermediate), mlp.activation, gated=mlp.gated, pdl=pdl
            ),
            lambda: self.head(self.picked_x[: min(rows, self.rows)]),
        ]
        return jobs

    def _ways(self, w: Matrix) -> list[int]:
        """Numbers of rows that between them take every way of multiplying by `w` that steps with prompts may."""
        sizes = sorted({min(n, self.tokens) for n in (MAX_ROWS.value, FEW_ROWS, ROWWISE_ROWS + 1)})
        return list({self._products.way(n, w): n for n in sizes}.values())

    def _some_product(self, rows: int, w: Matrix) -> None:
        inner = w.shape[1]
        self._linear(self._cut(0, rows, inner), w, None, self._cut(rows * inner, rows, len(w)))

    def _norm_jobs(self, w: LayerWeights, x: torch.Tensor, h: torch.Tensor) -> list[Callable[[], None]]:
        """`compile_jobs` of the norms of so many rows."""
        bad, eps, pdl = torch.zeros(len(x), dtype=torch.int32, device=x.device), self._eps, self._pdl
        post_attn, post_mlp = w.post_attn_norm, w.post_mlp_norm
        jobs = [
            lambda: add_norm(x, None, w.attn_norm, h, eps, pdl=pdl),
            lambda: add_norm(x, None, w.attn_norm, h, eps, bad=bad, pdl=pdl),
            lambda: add_norm(x, None, None, None, eps, bad=bad, pdl=pdl),
        ]
        if (coded := self._products.rounding(w.qkv, len(x))) is not None:
            jobs += [
                lambda: add_norm(x, None, w.attn_norm, h, eps, rounded=coded, pdl=pdl),
                lambda: add_norm(x, h, w.attn_norm, h, eps, post_weight=post_mlp, rounded=coded, pdl=pdl),
                lambda: add_norm(x, h, w.mlp_norm, h, eps, post_weight=post_attn, rounded=coded, pdl=pdl),
            ]
        few = len(x) <= FEW_ROWS
        matrices = [m for m in (w.out, w.down) if isinstance(m, torch.Tensor)]
        for n in {1} | {p for m in matrices for most, p in self.library.in_parts(*m.shape) if few or most > FEW_ROWS}:
            rows = x[:1] if few and n > 1 else x
            y = h if n == 1 else self._parts_of_sums[: n * len(rows)].view(n, len(rows), -1)
            jobs += [
                lambda x=rows, y=y: add_norm(x, y, w.mlp_norm, h, eps, post_weight=post_attn, pdl=pdl),
                lambda x=rows, y=y: add_norm(x, y, w.attn_norm, h, eps, post_weight=post_mlp, bad=bad, pdl=pdl),
                lambda x=rows, y=y: add_norm(x, y, None, None, eps, post_weight=post_mlp, pdl=pdl),
                lambda x=rows, y=y: add_norm(x, y, None, None, eps, post_weight=post_mlp, bad=bad, pdl=pdl),
            ]
        return jobs


def prefill_shape(tile_rows: int, a: Attention) -> dict[str, int]:
    """Block sizes of prompt attention that fit the shared memory and registers of every card from Ampere on."""
    wide = triton.next_power_of_2(a.head_dim) > 128
    if tile_rows <= 64:
        return {"block_m": 64, "block_n": 32 if wide else 64, "num_warps": 4, "stages": 2 if wide else 3}
    if tile_rows == 256:
        return {"block_m": 256, "block_n": 32 if wide else 64, "num_warps": 8, "stages": 2 if wide else 3}
    return {"block_m": 128, "block_n": 32 if wide else 64, "num_warps": 8, "stages": 2 if wide else 3}


def product(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """out fp32 = x times the transpose of w, accumulated in fp32 and never rounded on the way."""
    if x.dtype == out.dtype:
        torch.mm(x, w.t(), out=out)
    elif x.is_cuda:
        torch.ops.aten.mm.dtype_out(x, w.t(), out.dtype, out=out)
    else:
        out.copy_(x.float() @ w.float().t())


def rotation_rows(rope: Rope, max_model_len: int, device: torch.device) -> torch.Tensor:
    """fp32 [positions, dim]: cosines of each pair's angle, then sines, the magnitude of the scaling folded in."""
    radians, magnitude = frequencies(rope, max_model_len)
    angles = np.arange(max_model_len, dtype=np.float32)[:, None] * radians[None, :]
    table = np.concatenate([np.cos(angles), np.sin(angles)], 1) * np.float32(magnitude)
    return torch.from_numpy(table.astype(np.float32)).to(device)
