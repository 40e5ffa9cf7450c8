"""The least time that the work of a step can take on a card: its bytes at the memory's rate or its operations at the tensor
cores', whichever takes longer, by the kinds of kernels that `headrace profile` tells apart. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.base.errors import InvalidInput
from headrace.spec.accounting import ChunkShape, flops, kv_bytes, weights_read_bytes
from headrace.spec.hardware import find
from headrace.spec.model import Attention, DenseMLP, ModelSpec

ACTIVATION_BYTES = 2
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and bf16 operations a second that a card reaches, and where the figures are from."""

    bytes_s: float
    flops_s: float
    source: str

    def us(self, count_bytes: float, count_flops: float = 0.0) -> float:
        """The floor of so many bytes and operations, us."""
        return 1e6 * max(count_bytes / self.bytes_s, count_flops / self.flops_s)


def ceilings(card: str) -> Ceilings:
    """Of a card by the driver's name: the best that `headrace calibrate` measured, else what its datasheet says. The rate that a
    card sustains is no bound: until it is warm it is faster.

    `InvalidInput` for a card that the catalog has not, with the remedy.
    """
    try:
        gpu = find(card.removeprefix("NVIDIA "))
    except InvalidInput:
        raise InvalidInput(
            f"the catalog has no {card}", field="gpu", remedy="headrace calibrate measures it and writes its entry"
        ) from None
    read, rate = (
        name if gpu.has(name) else plain
        for name, plain in (("measured_read_gbs", "bandwidth_gbs"), ("measured_bf16_tflops", "bf16_tflops"))
    )
    bandwidth, tflops = gpu.figure(read).high, gpu.figure(rate).high
    source = " and ".join(dict.fromkeys("the best measured" if "measured" in n else "datasheet" for n in (read, rate)))
    return Ceilings(1e9 * bandwidth, 1e12 * tflops, f"{bandwidth:,.0f} GB/s, {tflops:,.0f} TFLOP/s, {source}")


def floors(spec: ModelSpec, weights: str, kv: str, chunks: Sequence[ChunkShape], card: Ceilings) -> dict[str, float]:
    """Of one step over `chunks`, us by kind. Every weight and every cached token is read once (a prefix that sequences share,
    once for each), every intermediate vector is written once and read once; what another kernel may do on its way, as
    a sum of residuals, is in nobody's figure, so kinds that were not launched have a floor all the same.
    """
    tokens, rows = sum(c.length for c in chunks), sum(c.sample for c in chunks)
    work = flops(spec, chunks)
    cached = sum(kv_bytes(spec, kv, c.start + c.length) for c in chunks)
    hidden = inner = turned = 0.0
    for layer in spec.layers:
        hidden += 4 * spec.hidden_size  # two norms: each reads the residual stream and writes what it makes of it
        if isinstance(layer.mlp, DenseMLP):
            inner += (2 + layer.mlp.gated) * layer.mlp.intermediate
        if isinstance(layer.mixer, Attention):
            a = layer.mixer
            turned += 2 * (a.num_heads + a.num_kv_heads) * a.head_dim + 3 * a.num_kv_heads * a.head_dim
    move = ACTIVATION_BYTES * tokens
    return {
        "gemm": card.us(weights_read_bytes(spec, weights, tokens), work.gemm + work.head),
        "attention": card.us(cached, work.attention),
        "norm": card.us(move * hidden),
        "activation": card.us(move * inner),
        "rope and cache": card.us(move * turned),
        "embedding": card.us(2 * move * spec.hidden_size),
        "sampling": card.us(LOGIT_BYTES * rows * spec.vocab_size),
    }


def idle_us(spans: Iterable[tuple[float, float]]) -> float:
    """Time between the first start and the last end of `spans` (start, end) in which none of them runs, however they overlap."""
    idle, reached = 0.0, None
    for start, end in sorted(spans):
        if reached is not None:
            idle += max(0.0, start - reached)
        reached = end if reached is None else max(reached, end)
    return idle
