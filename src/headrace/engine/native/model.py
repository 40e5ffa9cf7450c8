"""A model as the native backend holds it: options resolved, weights packed, an executor made of it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import headrace_native
import msgspec

from headrace.base.errors import InvalidInput
from headrace.control.api import MemoryItem
from headrace.control.step import StepPlan
from headrace.engine.backend import Formats, Limits, LogitsWatch
from headrace.engine.grammars import Grammars
from headrace.engine.memory import available_bytes, physical_cores
from headrace.engine.models import MODELS
from headrace.engine.native.ahead import Ahead, pool_note
from headrace.engine.native.compute import KV_TYPES, NativeCompute
from headrace.engine.native.layers import Plan
from headrace.engine.native.packed_cache import cached_weights
from headrace.engine.native.rotations import Rotations
from headrace.engine.step_thread import Step, ThreadExecutor, ThreadStep
from headrace.engine.steps import Steps
from headrace.engine.weights.checkpoint import Checkpoint
from headrace.engine.weights.open import open_weights
from headrace.spec.accounting import activation_bytes, kv_staging_bytes, native_weight_bytes
from headrace.spec.cache import CacheLayout
from headrace.spec.config import EngineConfig
from headrace.spec.locate import ModelFiles
from headrace.spec.packing import CHOICES, WEIGHTS
from headrace.spec.precision import kv_precision

if TYPE_CHECKING:
    from headrace.text.grammar import GrammarTokens

log = logging.getLogger("headrace.engine")

BF16_KERNELS = "avx512-bf16"
"""The kernel set that multiplies pairs of bf16 in one instruction."""


class Options(msgspec.Struct, frozen=True):
    """Resolved options of this backend. `pin`: CPUs that the worker threads are bound to, none if empty."""

    weights: str
    kv: str
    threads: int
    kernels: str
    exact_activations: bool
    pin: tuple[int, ...]


def resolve(config: EngineConfig) -> Options:
    """Every option of the backend, checked; InvalidInput names the field."""
    if config.weights not in WEIGHTS:
        raise _unknown("weights", config.weights, WEIGHTS)
    if config.kv not in ("auto", *KV_TYPES):
        raise _unknown("kv", config.kv, ("auto", *KV_TYPES))
    if config.attention not in ("auto", "native"):
        raise _unknown("attention", config.attention, ("auto", "native"))
    if config.block_tokens is not None and config.block_tokens % 16:
        raise InvalidInput(
            f"the native backend needs KV blocks of a multiple of 16 tokens, not {config.block_tokens}",
            field="block_tokens",
            remedy="set it to 16 or 32, or use backend torch",
        )
    group = 0 if config.kv == "auto" else kv_precision(config.kv).key_group
    if group and config.block_tokens is not None and config.block_tokens % group:
        raise InvalidInput(
            f"KV {config.kv} needs blocks of a multiple of {group} tokens, not {config.block_tokens}",
            field="block_tokens",
            remedy=f"set it to {group}",
        )
    given = dict(config.options)
    kernels = given.pop("kernels", "auto")
    known = ("auto", *headrace_native.kernels())
    if kernels not in known:
        raise _unknown("options.kernels", kernels, known)
    activations = given.pop("activations", "int8")
    if activations not in ("int8", "fp32"):
        raise _unknown("options.activations", activations, ("int8", "fp32"))
    kv = config.kv
    if kv == "auto":  # the same bytes; where there is an instruction for it, attention of bf16 takes half the time
        chosen = headrace_native.kernels()[0] if kernels == "auto" else kernels
        kv = "bf16" if chosen == BF16_KERNELS and activations == "int8" else "fp16"
    threads = config.threads or physical_cores()
    pin = _cpus(given.pop("pin", "off"), threads)
    if given:
        raise InvalidInput(
            f"the native backend has no option {next(iter(given))!r}",
            field="options",
            remedy="known: kernels, activations, pin",
        )
    return Options(config.weights, kv, threads, kernels, activations == "fp32", pin)


def offered() -> Formats:
    """Weights and KV that this backend computes with, aliases left out."""
    distinct = {packed: name for name, packed in reversed(CHOICES.items())}
    return Formats(tuple(reversed(distinct.values())), tuple(KV_TYPES))


def load(files: ModelFiles, config: EngineConfig) -> NativeModel:
    """Read and pack the weights. Raises CorruptCheckpoint, UnsupportedModel or InvalidInput."""
    options = resolve(config)
    available = available_bytes()
    pool = headrace_native.Pool(options.threads, list(options.pin))
    spec = files.spec()
    architecture = MODELS.get(spec.model_type)
    dummy = config.load_format == "dummy"
    names = architecture.gguf if files.kind == "gguf" and not dummy else architecture.hf
    plan = Plan(spec, names, Checkpoint(open_weights(files, config)), _dummy_weights(options.weights, spec, dummy))
    cached = None if dummy or not config.cache else cached_weights(files, plan.arena, pool)
    plan.arena.adopt(plan.arena.fill(pool) if cached is None else cached)
    return NativeModel(files, plan, options, pool, available, dummy)


class NativeExecutor(ThreadExecutor):
    """See `headrace.control.step.Executor` and `Idler`: idle, it readies memory of the KV pool."""

    def __init__(self, step: Step, max_num_seqs: int, ahead: Ahead) -> None:
        super().__init__(step, max_num_seqs, name="headrace-native")
        self._ahead = ahead

    def submit(self, plan: StepPlan) -> ThreadStep:
        self._ahead.use(plan.appends)
        return super().submit(plan)

    def idle(self) -> bool:
        return self._ahead.piece()


class NativeModel:
    """See `headrace.engine.backend.LoadedModel`."""

    def __init__(
        self,
        files: ModelFiles,
        plan: Plan,
        options: Options,
        pool: headrace_native.Pool,
        available: int,
        dummy: bool,
    ) -> None:
        self.spec = plan.spec
        self.device = "cpu"
        self.weights_precision = plan.precision
        self.kv_precision = options.kv
        self._files = files
        self._plan = plan
        self._options = options
        self._pool = pool
        self._available = available
        header = files.gguf() if files.kind == "gguf" and not dummy else None
        stored = files.safetensors() if files.kind == "hf" and not dummy else None
        predicted = native_weight_bytes(self.spec, _dummy_weights(options.weights, self.spec, dummy), header, stored)
        self._memory = [MemoryItem("weights", predicted, plan.arena.nbytes)]

    def kv_budget_bytes(self, memory_fraction: float, max_num_seqs: int, max_batched_tokens: int) -> int:
        """`memory_fraction` of what was available before loading, less weights and the modelled activation peak."""
        activations = activation_bytes(self.spec, max_batched_tokens, max_num_seqs, activation_precision="fp32")
        staging = kv_staging_bytes(self.spec, self.kv_precision, max_num_seqs, "fp32")
        return int(self._available * memory_fraction) - self._plan.arena.nbytes - activations - staging

    def executor(self, layout: CacheLayout, limits: Limits, watch: LogitsWatch | None = None) -> NativeExecutor:
        options = self._options
        model = self._plan.build(self._pool, layout, options.kernels, options.exact_activations)
        rotations = [Rotations(rope, limits.max_model_len) for rope in self._plan.ropes]
        staging = kv_staging_bytes(self.spec, options.kv, limits.max_num_seqs, "fp32")
        compute = NativeCompute(
            model,
            self._pool,
            layout,
            limits.num_blocks,
            rotations,
            self.spec.vocab_size,
            limits.max_num_seqs,
            staging,
            options.kernels,
        )
        self._memory.append(MemoryItem("kv_pool", layout.bytes_per_block * limits.num_blocks, compute.kv.nbytes))
        if staging:
            self._memory.append(MemoryItem("kv_staging", staging, compute.staging.nbytes))
        grammars = Grammars(self.spec.vocab_size, self._grammar_tokens)
        steps = Steps(compute, layout, limits, grammars, watch)
        ahead = Ahead(compute.kv, layout.bytes_per_block, available_bytes, self._available // 4)
        return NativeExecutor(steps.step, limits.max_num_seqs, ahead)

    def memory(self) -> tuple[MemoryItem, ...]:
        return tuple(self._memory)

    def notes(self) -> tuple[str, ...]:
        o = self._options
        kernels = headrace_native.kernels()[0] if o.kernels == "auto" else o.kernels
        activations = "fp32" if o.exact_activations else "int8 per 32"
        forms = ", ".join(f"{name} {count:,} B" for name, count in self._plan.packed_as.items())
        pinned = f", workers pinned to CPUs {list(o.pin)}" if o.pin else ""
        note = f"native backend: {kernels} kernels on {o.threads} threads{pinned}, activations {activations}, KV {o.kv}"
        return (note, f"weights packed as {forms}", pool_note())

    def _grammar_tokens(self) -> GrammarTokens:
        from headrace.text.grammar import GrammarTokens
        from headrace.text.tokenizer import Tokenizer

        files = self._files
        tokenizer = (
            Tokenizer.from_gguf(files.gguf().metadata) if files.kind == "gguf" else Tokenizer.from_folder(files.root)
        )
        return GrammarTokens.of(tokenizer, self.spec.eos_token_ids or tokenizer.eos_token_ids)


def _dummy_weights(weights: str, spec, dummy: bool) -> str:
    """Random weights are made in fp32; `auto` then means what the checkpoint would have been."""
    if not dummy or weights != "auto":
        return weights
    return spec.checkpoint_precision if spec.checkpoint_precision in ("fp32", "fp16", "bf16") else "int8"


def _cpus(text: str, threads: int) -> tuple[int, ...]:
    if text in ("", "off"):
        return ()
    allowed = sorted(os.sched_getaffinity(0))
    if text == "auto":
        return tuple(allowed[:threads])
    try:
        cpus = tuple(int(part) for part in text.split(","))
    except ValueError:
        cpus = ()
    if not cpus or not set(cpus) <= set(allowed):
        raise InvalidInput(
            f"pin={text} does not name CPUs of this process",
            field="options.pin",
            remedy=f"auto, off, or a comma-separated list out of {allowed}",
        )
    return cpus


def _unknown(field: str, value: str, known: tuple[str, ...]) -> InvalidInput:
    return InvalidInput(
        f"the native backend cannot use {field} {value!r}", field=field, remedy="choose one of: " + ", ".join(known)
    )
