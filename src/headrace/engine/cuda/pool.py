"""The KV blocks of all layers on the device, in any of the formats that the kernels read."""

from __future__ import annotations

import torch

from headrace.base.errors import InvalidInput
from headrace.spec.cache import CacheLayout
from headrace.spec.precision import kv_precision

PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CODED = ("fp8", "int8", "int4")
FORMATS = (*PLAIN, *CODED)


class KVPool:
    """`blocks` [layers_per_group, num_blocks, …]: what is copied where a block is copied; `nbytes` is the layout's to the byte.

    A block of a layer holds keys and values [2, kv_heads, block_tokens, head_dim]; behind codes of INT8 lie their scales [2,
    kv_heads, block_tokens] in fp16, behind those of INT4, two to a byte, scales and minima of values and of groups of keys.
    Nothing is initialized, since kernels leave alone what was not written.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, device: torch.device) -> None:
        vectors = (2, layout.num_kv_heads, layout.block_tokens)
        all_blocks = (layout.layers_per_group, num_blocks)
        name, dim = layout.kv_precision, layout.head_dim
        self._layers: list[tuple[torch.Tensor, torch.Tensor | None]]
        if name in PLAIN:
            self.blocks = torch.empty(*all_blocks, *vectors, dim, dtype=PLAIN[name], device=device)
            self._layers = [(layer, None) for layer in self.blocks]
            return
        if dim % 2:
            raise InvalidInput(f"KV {name} needs heads of an even size on the GPU, not {dim}", field="kv")
        if name == "int8" and layout.block_tokens % 2:
            raise InvalidInput(
                f"KV int8 needs blocks of an even number of tokens, not {layout.block_tokens}", field="block_tokens"
            )
        if name == "int4":
            self._groups_of_keys(layout, all_blocks, device)
            return
        count = 2 * layout.num_kv_heads * layout.block_tokens
        words = count * dim // 2
        self.blocks = torch.empty(
            *all_blocks, words + (count if name == "int8" else 0), dtype=torch.int16, device=device
        )
        codes = self.blocks[..., :words].unflatten(-1, (*vectors, dim // 2))
        if name == "int8":
            scales = self.blocks.view(torch.float16)[..., words:].unflatten(-1, vectors)
            self._layers = list(zip(codes, scales, strict=True))
        else:
            self._layers = [(layer, None) for layer in codes]

    def _groups_of_keys(self, layout: CacheLayout, all_blocks: tuple[int, int], device: torch.device) -> None:
        tokens, heads, dim, group = (
            layout.block_tokens, layout.num_kv_heads, layout.head_dim, kv_precision("int4").key_group,
        )  # fmt: skip
        if tokens % group:
            raise InvalidInput(
                f"KV int4 needs blocks of a multiple of {group} tokens, not {tokens}",
                field="block_tokens",
                remedy=f"set it to {group}",
            )
        if dim % 8:
            raise InvalidInput(f"KV int4 needs heads of a multiple of 8 on the GPU, not {dim}", field="kv")
        words = heads * tokens * dim // 2
        scales = 2 * heads * tokens + 2 * heads * (tokens // group) * dim
        self.blocks = torch.empty(*all_blocks, words + scales, dtype=torch.int16, device=device)
        codes = self.blocks[..., :words].unflatten(-1, (2, heads, tokens, dim // 4))
        self._layers = list(zip(codes, self.blocks.view(torch.float16)[..., words:], strict=True))

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def layer(self, slot: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Blocks of one layer and, of INT8 and INT4, their scales; see `headrace.engine.kernels.codes.geometry`."""
        return self._layers[slot]
