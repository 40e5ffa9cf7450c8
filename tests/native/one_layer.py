"""A model of one layer in float64 numpy, from the textbook, beside the same weights in `headrace_native`."""

from __future__ import annotations

from dataclasses import dataclass, field

import headrace_native
import numpy as np

from headrace.engine.native.memory import buffer
from headrace.spec.packing import PACKINGS

KV = {"fp16": 0, "fp32": 1, "int8": 2, "fp8": 3, "int4": 4, "bf16": 5}
ELEMENT = {"fp16": 2, "fp32": 4, "int8": 1, "fp8": 1, "int4": 0.5, "bf16": 2}
GROUP = 32

SLOTS = 8


@dataclass
class Shape:
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 96
    vocab: int = 50
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    qk_norm: bool = False
    rope_dim: int = 16
    interleaved: bool = False
    kv: str = "fp32"
    block_tokens: int = 16
    blocks: int = 80
    experts: int = 0
    top_k: int = 0
    seed: int = 0
    weights: dict = field(default_factory=dict)

    def __post_init__(self):
        if self.kv == "int4":
            self.block_tokens = max(self.block_tokens, GROUP)
        rng = np.random.default_rng(self.seed)

        def draw(*shape, scale=0.2):
            return (rng.standard_normal(shape) * scale).astype(np.float32)

        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.weights = {
            "embedding": draw(self.vocab, self.hidden, scale=1.0),
            "q": draw(q, self.hidden),
            "k": draw(k, self.hidden),
            "v": draw(k, self.hidden),
            "out": draw(self.hidden, q),
            "gate": draw(self.intermediate, self.hidden),
            "up": draw(self.intermediate, self.hidden),
            "down": draw(self.hidden, self.intermediate),
            "attention_norm": 1 + draw(self.hidden),
            "mlp_norm": 1 + draw(self.hidden),
            "final_norm": 1 + draw(self.hidden),
            "q_norm": 1 + draw(self.head_dim),
            "k_norm": 1 + draw(self.head_dim),
            "sinks": draw(self.heads, scale=1.0),
        }

    def angles(self, positions):
        radians = 10000.0 ** (-np.arange(0, self.rope_dim, 2) / self.rope_dim)
        at = np.asarray(positions, np.float32)[:, None] * radians.astype(np.float32)[None]
        return np.cos(at).astype(np.float32), np.sin(at).astype(np.float32)


class Native:
    """The layer in native code, one scattered block table per sequence."""

    def __init__(self, s: Shape, kernels: str = "auto", threads: int = 2, exact: bool = True):
        self.s = s
        self.pool = headrace_native.Pool(threads)
        self.kept = []
        w = s.weights
        self.model = headrace_native.Model(
            {"hidden": s.hidden, "vocab": s.vocab, "eps": 1e-6, "exact_activations": exact}, self.pool, kernels
        )
        layer = {
            "heads": s.heads,
            "kv_heads": s.kv_heads,
            "head_dim": s.head_dim,
            "scale": s.head_dim**-0.5,
            "window": s.window,
            "softcap": s.softcap,
            "rope": 0,
            "rope_dim": s.rope_dim,
            "rope_interleaved": s.interleaved,
            "qkv": [self.matrix(w[n]) for n in "qkv"],
            "out": [self.matrix(w["out"])],
            "gate_up": [self.matrix(w["gate"]), self.matrix(w["up"])],
            "down": [self.matrix(w["down"])],
            "attention_norm": w["attention_norm"],
            "mlp_norm": w["mlp_norm"],
        }
        if s.sinks:
            layer["sinks"] = w["sinks"]
        if s.qk_norm:
            layer |= {"q_norm": w["q_norm"], "k_norm": w["k_norm"]}
        self.model.add_layer(layer)
        table = self.matrix(w["embedding"])
        self.model.set_ends(table, table, w["final_norm"])
        per_token = s.kv_heads * 2 * (s.head_dim * ELEMENT[s.kv] + (2 if s.kv == "int8" else 0))
        if s.kv == "int4":
            per_token += s.kv_heads * (s.head_dim * 4 / GROUP + 4)
        self.kv = buffer(int(s.blocks * s.block_tokens * per_token))
        self.kv[:] = 0xFF  # NaN in every type: what was never written must never be read
        self.model.set_kv(self.kv, KV[s.kv], 1, s.blocks, s.block_tokens, s.kv_heads, s.head_dim, s.head_dim, 1)
        if s.kv == "int4":
            self.staging = buffer(4 * SLOTS * s.kv_heads * s.head_dim * GROUP)
            self.staging.view(np.float32)[:] = np.nan
            self.model.set_staging(self.staging, SLOTS)

    def matrix(self, values):
        form = PACKINGS["fp32"]
        n, k = values.shape
        out = np.zeros(form.nbytes(n, k), np.uint8)
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        headrace_native.pack(raw, 0, out, form.codes, form.scales, form.zero, n, k, self.pool)
        self.kept.append(out)
        return headrace_native.Matrix(out, form.codes, form.scales, form.zero, n, k)

    def step(self, chunks, tables):
        """chunks: (sequence, start, tokens); logits of every row."""
        tokens = np.concatenate([t for _, _, t in chunks]).astype(np.int32)
        starts = np.cumsum([0, *(len(t) for _, _, t in chunks)]).astype(np.int32)
        context = np.array([c for _, c, _ in chunks], np.int32)
        positions = np.concatenate([np.arange(c, c + len(t)) for _, c, t in chunks])
        cos, sin = self.s.angles(positions)
        table = np.ascontiguousarray(tables[[i for i, _, _ in chunks]])[None]
        rows = np.arange(len(tokens), dtype=np.int32)
        broken = np.zeros(len(chunks), np.uint8)
        staging = ()
        if self.s.kv == "int4":  # a sequence is its own slot, and always goes on where it ended
            staging = (np.array([i for i, _, _ in chunks], np.int32), np.zeros(len(chunks), np.uint8))
        self.model.step(tokens, starts, context, table, [cos], [sin], rows, broken, *staging)
        assert not broken.any()
        out = np.empty((len(tokens), self.s.vocab), np.float32)
        self.model.logits(0, out)
        return out


def norm(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w


def stored(x, kv):
    """What the cache makes of vectors [..., dim]."""
    if kv == "fp16":
        return x.astype(np.float16).astype(np.float64)
    if kv == "bf16":
        return rounded_to_bf16(x)
    if kv == "int8":
        scale = (np.abs(x).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float64)
        return np.clip(np.rint(x / np.where(scale > 0, scale, 1)), -128, 127) * scale
    if kv == "int4":
        return coded_in_4_bits(x, -1)
    if kv == "fp8":  # three bits of mantissa down to 2^-6, multiples of 2^-9 below
        step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 2.0**-6))) - 3)
        return np.clip(np.rint(x / step) * step, -448, 448)
    return x


def rounded_to_bf16(x):
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 2.0**-126))) - 7)
    return np.rint(x / step) * step


def coded_in_4_bits(x, axis):
    """Minimum and step in fp16 along `axis`, 15 steps."""
    least = x.min(axis, keepdims=True).astype(np.float16).astype(np.float64)
    step = (np.maximum(x.max(axis, keepdims=True) - least, 0) / 15).astype(np.float16).astype(np.float64)
    return np.clip(np.rint((x - least) / np.where(step == 0, 1, step)), 0, 15) * step + least


def stored_keys(x, kv):
    """Keys [tokens, heads, dim] as queries of other groups see them."""
    if kv != "int4":
        return stored(x, kv)
    whole = len(x) // GROUP * GROUP
    groups = coded_in_4_bits(x[:whole].reshape(-1, GROUP, *x.shape[1:]), 1)
    return np.concatenate([groups.reshape(whole, *x.shape[1:]), x[whole:]])


def reference(s: Shape, tokens) -> np.ndarray:
    """Logits at every position."""
    w = {name: value.astype(np.float64) for name, value in s.weights.items()}
    n, d = len(tokens), s.head_dim
    x = w["embedding"][tokens]
    h = norm(x, w["attention_norm"])
    q, k, v = ((h @ w[name].T).reshape(n, -1, d) for name in "qkv")
    if s.qk_norm:
        q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
    cos, sin = (a.astype(np.float64)[:, None] for a in s.angles(range(n)))

    def rotate(y):
        y = y.copy()
        part = y[..., : s.rope_dim]
        half = s.rope_dim // 2
        a, b = (part[..., 0::2], part[..., 1::2]) if s.interleaved else (part[..., :half], part[..., half:])
        first, second = a * cos - b * sin, b * cos + a * sin
        if s.interleaved:
            part[..., 0::2], part[..., 1::2] = first, second
        else:
            part[..., :half], part[..., half:] = first.copy(), second.copy()
        return y

    q, own = rotate(q), rotate(k)
    k = stored_keys(own, s.kv)
    if s.kv == "bf16":
        q = rounded_to_bf16(q * d**-0.5) * d**0.5
    same_group = np.arange(n)[:, None] // GROUP == np.arange(n)[None] // GROUP
    v = stored(v, s.kv)
    group = s.heads // s.kv_heads
    attended = np.zeros((n, s.heads, d))
    for head in range(s.heads):
        scores = q[:, head] @ k[:, head // group].T * d**-0.5
        if s.kv == "int4":
            scores = np.where(same_group, q[:, head] @ own[:, head // group].T * d**-0.5, scores)
        if s.softcap:
            scores = s.softcap * np.tanh(scores / s.softcap)
        seen = np.arange(n)[:, None] - np.arange(n)[None]
        scores[(seen < 0) | ((seen >= s.window) if s.window else False)] = -np.inf
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        if s.kv == "bf16":
            weights = rounded_to_bf16(weights)
        if s.sinks:
            total = total + np.exp(w["sinks"][head] - top)
        attended[:, head] = weights / total @ v[:, head // group]
    x = x + attended.reshape(n, -1) @ w["out"].T
    h = norm(x, w["mlp_norm"])
    gate = h @ w["gate"].T
    x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"].T)) @ w["down"].T
    return norm(x, w["final_norm"]) @ w["embedding"].T


def tables(s: Shape, sequences: int, rng) -> np.ndarray:
    """Scattered block tables, no block used twice."""
    width = s.blocks // sequences
    return rng.permutation(s.blocks)[: width * sequences].astype(np.int32).reshape(sequences, width)
