"""The tensor types of ggml: how many elements share a block and how many bytes a block takes."""

from __future__ import annotations

import msgspec


class GGMLType(msgspec.Struct, frozen=True):
    """One storage type. A row of `n` elements takes `n / block_elements * block_bytes` bytes; `id` is its code in a file."""

    id: int
    name: str
    block_elements: int
    block_bytes: int

    @property
    def bits_per_element(self) -> float:
        return self.block_bytes * 8 / self.block_elements


_ROWS = (
    (0, "f32", 1, 4),
    (1, "f16", 1, 2),
    (2, "q4_0", 32, 2 + 16),
    (3, "q4_1", 32, 2 + 2 + 16),
    (6, "q5_0", 32, 2 + 4 + 16),
    (7, "q5_1", 32, 2 + 2 + 4 + 16),
    (8, "q8_0", 32, 2 + 32),
    (9, "q8_1", 32, 4 + 4 + 32),
    (10, "q2_k", 256, 16 + 64 + 2 + 2),
    (11, "q3_k", 256, 32 + 64 + 12 + 2),
    (12, "q4_k", 256, 2 + 2 + 12 + 128),
    (13, "q5_k", 256, 2 + 2 + 12 + 32 + 128),
    (14, "q6_k", 256, 128 + 64 + 16 + 2),
    (15, "q8_k", 256, 4 + 256 + 32),
    (16, "iq2_xxs", 256, 2 + 64),
    (17, "iq2_xs", 256, 2 + 64 + 8),
    (18, "iq3_xxs", 256, 2 + 64 + 32),
    (19, "iq1_s", 256, 2 + 32 + 16),
    (20, "iq4_nl", 32, 2 + 16),
    (21, "iq3_s", 256, 2 + 64 + 8 + 32 + 4),
    (22, "iq2_s", 256, 2 + 64 + 16),
    (23, "iq4_xs", 256, 2 + 2 + 4 + 128),
    (24, "i8", 1, 1),
    (25, "i16", 1, 2),
    (26, "i32", 1, 4),
    (27, "i64", 1, 8),
    (28, "f64", 1, 8),
    (29, "iq1_m", 256, 32 + 16 + 8),
    (30, "bf16", 1, 2),
    (34, "tq1_0", 256, 48 + 4 + 2),
    (35, "tq2_0", 256, 64 + 2),
    (39, "mxfp4", 32, 1 + 16),
    (40, "nvfp4", 64, 4 + 32),
)

GGML_TYPES: dict[int, GGMLType] = {row[0]: GGMLType(*row) for row in _ROWS}
GGML_TYPES_BY_NAME: dict[str, GGMLType] = {t.name: t for t in GGML_TYPES.values()}
