"""From options to a running engine core: every `auto` is resolved here, once, and what it became is logged."""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from headrace.base.clock import Clock, SystemClock
from headrace.base.errors import DoesNotFit, InvalidInput, UnsupportedModel
from headrace.base.process import process_start_s
from headrace.base.registry import Registry
from headrace.base.units import GIB, format_bytes
from headrace.control.api import EngineInfo
from headrace.control.config import SchedulerConfig
from headrace.control.demand import Demand
from headrace.control.policies import EVICTION, ORDER
from headrace.control.prefill import CPU_LIMITS, GPU_LIMITS, PrefillLimits
from headrace.control.scheduler import Scheduler
from headrace.control.step import Executor
from headrace.engine.backend import Backend, Limits, LoadedModel
from headrace.spec.accounting import cache_layout, default_block_tokens, kv_bytes_per_token
from headrace.spec.cache import CacheLayout
from headrace.spec.config import EngineConfig
from headrace.spec.locate import ModelFiles, locate
from headrace.spec.model import ModelSpec

log = logging.getLogger("headrace.engine")

BACKENDS = Registry("headrace.engine.executors", "BACKEND", kind="backend")
PREFERENCE = ("cuda", "native", "torch")
# On a CPU the pool competes with everything else on the machine, so by default it takes only what pays: a few GiB hold
# dozens of conversations of a model small enough to be served there.
CPU_POOL_BYTES = 2 * GIB


class EngineCore(msgspec.Struct, frozen=True):
    """A scheduler and the executor that runs its plans, sized for each other."""

    scheduler: Scheduler
    executor: Executor
    info: EngineInfo


class _Defaults(msgspec.Struct, frozen=True):
    max_num_seqs: int
    max_batched_tokens: int
    prefill: PrefillLimits
    memory_fraction: float
    pool_bytes: int | None


_CPU = _Defaults(
    max_num_seqs=64, max_batched_tokens=512, prefill=CPU_LIMITS, memory_fraction=0.6, pool_bytes=CPU_POOL_BYTES
)
# Prompts alone fill the tensor cores best in long chunks.
_GPU = _Defaults(max_num_seqs=256, max_batched_tokens=16384, prefill=GPU_LIMITS, memory_fraction=0.9, pool_bytes=None)


class Stages:
    """Seconds spent in each named stage, in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = self._clock.now()
        try:
            yield
        finally:
            self.seconds[name] = self._clock.now() - begin


def launch(config: EngineConfig, *, files: ModelFiles | None = None, clock: Clock | None = None) -> EngineCore:
    """Load the model and make the core that serves it. `files`: what `locate` found, if it was asked before.

    Raises `InvalidInput`, `UnsupportedModel`, `CorruptCheckpoint` or `DoesNotFit`, each naming option and remedy.
    """
    clock = clock or SystemClock()
    stages = Stages(clock)
    stages.seconds["until launch"] = clock.now() - process_start_s()
    with stages.stage("read the model's header"):
        files = files or locate(config.model, revision=config.revision, cached=config.cache)
        _check(config, files.spec())
    with stages.stage("import the backend"):
        backend, notes = choose_backend(config, files)
    for name, value in getattr(backend, "environment", ()):
        os.environ.setdefault(name, value)
    for library in getattr(backend, "libraries", ()):
        with stages.stage(f"import {library}"):
            importlib.import_module(library)
    with stages.stage("load the weights"):
        model = backend.load(files, config)
    with stages.stage("allocate the KV pool"):
        core = _assemble(config, files, backend, model, notes, clock)
    stages.seconds["engine ready"] = clock.now() - process_start_s()
    core.info.startup_s.update(stages.seconds)
    for note in core.info.notes:
        log.info("%s", note)
    for item in core.info.memory:
        off = item.actual_bytes / item.predicted_bytes - 1 if item.predicted_bytes else 0.0
        log.info(
            "memory, %s: %s bytes predicted, %s held (%s)", item.name, f"{item.predicted_bytes:,}", f"{item.actual_bytes:,}",
            f"{off:+.1%}" if off else "equal",
        )  # fmt: skip
    return core


def choose_backend(config: EngineConfig, files: ModelFiles) -> tuple[Backend, list[str]]:
    """The backend asked for, or the first of `PREFERENCE` that can; with the reasons why others were passed over."""
    if config.backend != "auto":
        backend: Backend = BACKENDS.get(config.backend)
        reason = backend.unavailable(files, config)
        if reason is not None:
            raise UnsupportedModel(f"backend {config.backend} cannot serve {files.name}: {reason}", field="backend")
        return backend, []
    passed_over = []
    known = BACKENDS.names()
    for name in (n for n in PREFERENCE if n in known):
        try:
            backend = BACKENDS.get(name)
            reason = backend.unavailable(files, config)
        except ImportError as error:
            reason = f"it cannot be imported ({error})"
        if reason is None:
            return backend, [f"backend {name} passed over: {why}" for name, why in passed_over]
        passed_over.append((name, reason))
    raise UnsupportedModel(
        f"no backend can serve {files.name}: " + "; ".join(f"{name}: {reason}" for name, reason in passed_over),
        field="backend",
    )


def _check(config: EngineConfig, spec: ModelSpec) -> None:
    """Refuse what is wrong whatever the weights are, before they are loaded."""
    ORDER.get(config.order)
    EVICTION.get(config.eviction)
    if config.drafter != "none":
        raise InvalidInput(f"unknown drafter {config.drafter!r}", field="drafter", remedy="choose one of: none")
    if config.max_model_len is not None and config.max_model_len > spec.max_context:
        raise InvalidInput(
            f"max_model_len {config.max_model_len:,} is beyond the model's context of {spec.max_context:,} tokens",
            field="max_model_len",
            remedy=f"set it to {spec.max_context} or less",
        )


def _assemble(
    config: EngineConfig,
    files: ModelFiles,
    backend: Backend,
    model: LoadedModel,
    notes: list[str],
    clock: Clock,
) -> EngineCore:
    defaults = _CPU if model.device == "cpu" else _GPU
    layout = cache_layout(
        model.spec, model.kv_precision, config.block_tokens or default_block_tokens(model.kv_precision)
    )
    max_num_seqs = config.max_num_seqs or defaults.max_num_seqs
    longest = 0 if config.chunked_prefill else config.max_model_len or model.spec.max_context
    max_batched_tokens = config.max_batched_tokens or max(defaults.max_batched_tokens, max_num_seqs, longest)
    pool = Pool(config, model, layout, defaults, max_num_seqs, max_batched_tokens)
    limits = Limits(pool.num_blocks, max_num_seqs, pool.max_model_len, max_batched_tokens)
    prefill = _prefill_limits(config, defaults)
    log.info(
        "prompts beside running streams: at most %s tokens, steps of about %s",
        prefill.max_prefill_tokens or max_batched_tokens,
        "any length" if prefill.step_target_s is None else f"{prefill.step_target_s * 1e3:g} ms",
    )
    settings = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        max_model_len=pool.max_model_len,
        max_prefill_tokens=prefill.max_prefill_tokens,
        prefill_burst=prefill.prefill_burst,
        step_target_s=prefill.step_target_s,
        prefix_caching=config.prefix_cache,
        chunked_prefill=config.chunked_prefill,
        order=config.order,
        eviction=config.eviction,
    )
    executor = model.executor(layout, limits)  # first: a pool that the device does not have fails here at once
    scheduler = Scheduler(settings, layout, pool.num_blocks, clock)
    info = EngineInfo(
        model=files.name,
        model_type=model.spec.model_type,
        backend=backend.name,
        vocab_size=model.spec.vocab_size,
        max_model_len=pool.max_model_len,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        block_tokens=layout.block_tokens,
        num_blocks=pool.num_blocks,
        kv_bytes_per_token=kv_bytes_per_token(model.spec, model.kv_precision),
        pool_tokens=pool.num_blocks // layout.num_groups * layout.block_tokens,
        weights_precision=model.weights_precision,
        kv_precision=model.kv_precision,
        memory=model.memory(),
        notes=(*notes, *pool.notes, *model.notes(), *_cache_notes(files, model.kv_precision)),
        startup_s={},
    )
    return EngineCore(scheduler, executor, info)


def _cache_notes(files: ModelFiles, kv: str) -> list[str]:
    """What a checkpoint asks of keys and values, which `kv` decides: a user should know when the two differ."""
    scheme = (files.quantization() or {}).get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return []
    asked = f"{'fp' if scheme.get('type') == 'float' else 'int'}{scheme.get('num_bits')}"
    if asked == kv:
        held = "so they are, without its scales"
    else:
        held = f"they are {kv} here" + (f", --kv {asked} makes them so" if asked in ("fp8", "int8", "int4") else "")
    return [f"the checkpoint asks for {asked} keys and values (kv_cache_scheme): {held}"]


def _prefill_limits(config: EngineConfig, defaults: _Defaults) -> PrefillLimits:
    """What was asked for, and only that; else the default, but without chunks a prompt must fit into one step."""
    if config.max_prefill_tokens is None and config.step_target_ms is None:
        return defaults.prefill if config.chunked_prefill else PrefillLimits()
    target_ms = config.step_target_ms
    return PrefillLimits(
        max_prefill_tokens=config.max_prefill_tokens, step_target_s=None if target_ms is None else target_ms / 1e3
    )


class Pool:
    """How many blocks the KV pool gets and the longest sequence it serves.

    The size is `num_blocks`, else `kv_bytes`, else what `memory_fraction` leaves; by default on a CPU no more than
    `CPU_POOL_BYTES` or what `max_num_seqs` sequences of full length can use. It must hold one sequence of
    `max_model_len`: one that was asked for is an error if it does not fit, the model's own context is cut to what does.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        layout: CacheLayout,
        defaults: _Defaults,
        max_num_seqs: int,
        max_batched_tokens: int,
    ) -> None:
        self._config = config
        self._block_bytes = layout.bytes_per_block
        demand = Demand(layout)
        wanted = config.max_model_len or model.spec.max_context
        needed = demand.peak(wanted, max_batched_tokens)
        self.notes: list[str] = []

        def budget(fraction: float) -> int:
            return model.kv_budget_bytes(fraction, max_num_seqs, max_batched_tokens)

        if config.num_blocks is not None:
            self.num_blocks = config.num_blocks
        elif config.kv_bytes is not None:
            self.num_blocks = config.kv_bytes // self._block_bytes
        else:
            self.num_blocks = max(0, budget(config.memory_fraction or defaults.memory_fraction)) // self._block_bytes
            if config.memory_fraction is None and defaults.pool_bytes is not None:
                useful = min(defaults.pool_bytes // self._block_bytes, max_num_seqs * needed)
                self.num_blocks = min(self.num_blocks, max(useful, needed))
        # A GPU refuses what it does not have; a host would give the addresses and end the process when it needs the pages.
        if model.device == "cpu" and self.num_blocks * self._block_bytes > (spare := max(0, budget(1.0))):
            raise self._beyond_memory(spare)

        self.max_model_len = wanted
        if needed > self.num_blocks:
            fitting = _longest(demand, self.num_blocks, wanted, max_batched_tokens)
            if config.max_model_len is not None or fitting < 2:
                raise self._does_not_fit(wanted, needed, fitting, layout, budget)
            self.max_model_len = fitting
            self.notes.append(
                f"max_model_len is {fitting:,} tokens, all that the KV pool holds, not the model's {wanted:,}; "
                f"kv_bytes {needed * self._block_bytes} would hold them"
            )

    def _beyond_memory(self, spare_bytes: int) -> DoesNotFit:
        most = spare_bytes // self._block_bytes
        field, fitting = (
            ("num_blocks", most) if self._config.num_blocks is not None else ("kv_bytes", most * self._block_bytes)
        )
        return DoesNotFit(
            f"a KV pool of {self.num_blocks:,} blocks is {format_bytes(self.num_blocks * self._block_bytes)}, and the available "
            f"memory leaves {format_bytes(spare_bytes)} beside weights and activations",
            field=field,
            remedy=f"set {field} to {fitting} or less, or leave it out" if most else "leave it out",
        )

    def _does_not_fit(self, wanted: int, needed: int, fitting: int, layout: CacheLayout, budget) -> DoesNotFit:
        need_bytes = needed * self._block_bytes
        if self._config.num_blocks is not None:
            field, larger = "num_blocks", f"set num_blocks to {needed}"
        elif self._config.kv_bytes is not None:
            field, larger = "kv_bytes", f"set kv_bytes to {need_bytes}"
        else:
            field = "memory_fraction"
            fraction = next((f / 100 for f in range(1, 101) if budget(f / 100) >= need_bytes), None)
            larger = f"set memory_fraction to {fraction:g}" if fraction is not None else ""
        shorter = f"set max_model_len to {fitting}" if fitting >= 2 else ""
        spare = budget(1.0)
        remedy = " or ".join(option for option in (larger, shorter) if option)
        return DoesNotFit(
            f"a sequence of {wanted:,} tokens needs {needed:,} KV blocks of {layout.block_tokens} tokens "
            f"({self._block_bytes:,} B each, {format_bytes(need_bytes)} in all); the pool has {self.num_blocks:,} "
            f"({format_bytes(self.num_blocks * self._block_bytes)}), and all of the memory would leave it "
            f"{format_bytes(spare) if spare > 0 else f'nothing: {format_bytes(-spare)} are missing for weights and activations'}",
            field=field,
            remedy=remedy or "use a smaller model, a smaller precision or a machine with more memory",
        )


def _longest(demand: Demand, num_blocks: int, at_most: int, chunk_tokens: int) -> int:
    """Longest sequence that `num_blocks` hold while it is computed in chunks of up to `chunk_tokens`."""
    low, high = 0, at_most
    while low < high:
        middle = math.ceil((low + high) / 2)
        if demand.peak(middle, chunk_tokens) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
