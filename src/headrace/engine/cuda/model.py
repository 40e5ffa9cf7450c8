"""A model on a GPU: loading, memory accounting, and the executor that runs its steps."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterable

import torch

from headrace.base.errors import InvalidInput
from headrace.base.units import MIB, format_bytes
from headrace.control.api import MemoryItem
from headrace.control.step import StepPlan
from headrace.engine.backend import Formats, Limits, LogitsWatch
from headrace.engine.cuda import flashinfer
from headrace.engine.cuda.decoder import Decoder
from headrace.engine.cuda.pool import FORMATS as KV_FORMATS
from headrace.engine.cuda.products import buffer_bytes
from headrace.engine.cuda.runner import CudaStep, Runner
from headrace.engine.cuda.upload import Uploader
from headrace.engine.cuda.weights import DecoderWeights, Quantized, load_weights
from headrace.engine.grammars import Grammars
from headrace.engine.kernels.cached import settle_keys
from headrace.engine.kernels.compilers import Compilers
from headrace.engine.kernels.launchers import spare_checks
from headrace.engine.kernels.table import GemmTable
from headrace.engine.models import MODELS
from headrace.engine.quant.formats import Format
from headrace.engine.quant.formats import names as format_names
from headrace.engine.quant.loading import bytes_predicted, policy_of, wanted_format
from headrace.engine.weights.checkpoint import Checkpoint
from headrace.engine.weights.open import open_weights
from headrace.engine.weights.quantized import QuantizedSource
from headrace.engine.weights.source import TensorSource
from headrace.spec.accounting import activation_bytes, kv_staging_bytes, weight_bytes
from headrace.spec.cache import CacheLayout
from headrace.spec.config import EngineConfig
from headrace.spec.locate import ModelFiles
from headrace.spec.model import ModelSpec
from headrace.text.grammar import GrammarTokens

log = logging.getLogger("headrace.engine")

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_OPTIONS = ("graphs", "pdl", "activations")
RESERVE_BYTES = 768 * MIB
"""Kept free beside the pool for captured graphs, cuBLAS, compiled kernels and the rows of log-probabilities."""


def offered() -> Formats:
    """Weights and KV that this backend computes with."""
    return Formats((*_DTYPES, *format_names()), KV_FORMATS)


def load(files: ModelFiles, config: EngineConfig) -> CudaModel:
    """Start reading the weights; they are complete when `executor` returns. Raises CorruptCheckpoint or InvalidInput."""
    begin = time.perf_counter()
    options = dict(config.options)
    for name in options:
        if name not in _OPTIONS:
            raise InvalidInput(
                f"the cuda backend has no option {name!r}", field="options", remedy="known: " + ", ".join(_OPTIONS)
            )
    spec = files.spec()
    source = open_weights(files, config)
    form = wanted_format(config.weights, source, spec, tuple(_DTYPES), "cuda")
    computed = _computed(config, form)
    kv = _chosen("kv", config.kv, computed, KV_FORMATS)
    if config.attention not in ("auto", "triton", "flashinfer"):
        raise InvalidInput(
            f"the cuda backend has no attention {config.attention!r}",
            field="attention",
            remedy="choose triton, flashinfer or auto",
        )
    device, compilers = torch.device("cpu"), None
    if torch.cuda.is_available():
        # Copied before weights are under way: with few threads, and no host memory that the device reads.
        settle_keys(quantized=form is not None)
        compilers = Compilers()
        device = torch.device("cuda:0" if config.device in ("auto", "cuda") else config.device)
        torch.cuda.set_device(device)
    free = torch.cuda.mem_get_info(device) if device.type == "cuda" else (2 << 30, 2 << 30)
    if config.attention == "flashinfer" and (reason := flashinfer.unfit(spec, computed, kv, device)) is not None:
        raise InvalidInput(
            f"attention flashinfer cannot be used: {reason}", field="attention", remedy="choose triton or auto"
        )
    architecture = MODELS.get(spec.model_type)
    dummy = config.load_format == "dummy"
    names = architecture.gguf if files.kind == "gguf" and not dummy else architecture.hf
    seed = config.seed if dummy else None
    loaded, uploader, quantized = load_weights(
        spec, names, Checkpoint(source), _DTYPES[computed], device, seed, form, policy_of(source)
    )  # fmt: skip
    log.info("weights allocated and on their way after %.2f s", time.perf_counter() - begin)
    weights = computed if form is None else form.name
    predicted = weight_bytes(spec, computed).total
    if form is not None:
        predicted = bytes_predicted(spec, form, computed, quantized.plain, quantized.matrices)
    return CudaModel(
        files, spec, loaded, uploader, weights, computed, predicted, _notes(source, form, computed, quantized), kv, device,
        free, options, config.attention, compilers,
    )  # fmt: skip


class CudaModel:
    """See `headrace.engine.backend.LoadedModel`."""

    def __init__(
        self,
        files: ModelFiles,
        spec: ModelSpec,
        weights: DecoderWeights,
        uploader: Uploader,
        weights_precision: str,
        computed: str,
        predicted_bytes: int,
        notes: list[str],
        kv_precision: str,
        device: torch.device,
        memory: tuple[int, int],
        options: dict[str, str],
        attention: str = "auto",
        compilers: Compilers | None = None,
    ) -> None:
        self.spec = spec
        self.weights_precision = weights_precision
        self.kv_precision = kv_precision
        self.device = str(device)
        self._files = files
        self._weights = weights
        self._uploader = uploader
        self._device = device
        self._attention = attention
        self._compilers = compilers
        self._free_before, self._total = memory
        self._graphs = options.get("graphs", "1") not in ("0", "false") and device.type == "cuda"
        self._pdl = options.get("pdl", "1") not in ("0", "false")
        self._computed = computed
        self._memory = [MemoryItem("weights", predicted_bytes, weights.nbytes)]
        self._notes = notes

    def kv_budget_bytes(self, memory_fraction: float, max_num_seqs: int, max_batched_tokens: int) -> int:
        """`memory_fraction` of the card, less what others hold, the weights, the step's buffers and a reserve."""
        others = self._total - self._free_before
        activations = activation_bytes(self.spec, max_batched_tokens, max_num_seqs, activation_precision=self._computed)
        logits = 2 * 4 * max_num_seqs * self.spec.vocab_size
        taken = others + self._weights.nbytes + activations + logits + RESERVE_BYTES
        taken += kv_staging_bytes(self.spec, self.kv_precision, max_num_seqs, self._computed)
        taken += buffer_bytes(self._weights.matrices(), max_batched_tokens, _DTYPES[self._computed])
        if self._attention == "flashinfer":
            sms = torch.cuda.get_device_properties(self._device).multi_processor_count
            taken += flashinfer.workspace_bytes(self.spec, max_num_seqs, sms)
        return int(self._total * memory_fraction) - taken

    def executor(self, layout: CacheLayout, limits: Limits, watch: LogitsWatch | None = None) -> CudaExecutor:
        spec, device = self.spec, self._device
        cuda = device.type == "cuda"
        if self.weights_precision != self._computed:
            # What rounding to a format takes besides must be given back before the pool takes the rest of the card.
            self._uploader.finish()
            if cuda:
                torch.cuda.empty_cache()
            if names := self._uploader.rounded:
                self._notes.append(f"scales of {len(names)} tensors, {names[0]} the first, were rounded to fp16")
        card, sms, capability = "interpreter", 4, (8, 0)
        if cuda:
            properties = torch.cuda.get_device_properties(device)
            card, sms = properties.name, properties.multi_processor_count
            capability = (properties.major, properties.minor)
        table = GemmTable(card, sms)
        pdl = self._pdl and cuda and capability >= (9, 0)
        decoder = Decoder(
            spec, self._weights, layout, limits, table, _DTYPES[self._computed],
            device, sms=sms, pdl=pdl, capability=capability,
        )  # fmt: skip
        attention = self._choose_attention(decoder, layout, sms)
        group = max(layer.mixer.num_heads // layer.mixer.num_kv_heads for layer in spec.layers)
        grammars = Grammars(spec.vocab_size, self._grammar_tokens)
        runner = Runner(decoder, layout, limits, grammars, spec.vocab_size, group, watch)
        begin = time.perf_counter()
        if cuda:
            try:
                runner.warm_up(graphs=self._graphs, compilers=self._compilers)
            finally:
                if self._compilers is not None:
                    self._compilers.close()
            spare_checks()
        warm_s = time.perf_counter() - begin
        self._uploader.finish()
        self._memory += [
            MemoryItem("kv_pool", layout.bytes_per_block * limits.num_blocks, decoder.pool.nbytes),
            *self._staging(decoder, limits),
            MemoryItem(
                "activations",
                activation_bytes(
                    spec, limits.max_batched_tokens, limits.max_num_seqs, activation_precision=self._computed
                ),
                decoder.activation_bytes,
            ),
            # Of the rows that are sampled: their last hidden states and their logits, kept apart from the layers' buffers.
            MemoryItem(
                "logits",
                decoder.rows * (4 * spec.vocab_size + decoder.x.element_size() * spec.hidden_size),
                decoder.logits.nbytes + decoder.picked_x.nbytes,
            ),
        ]
        self._notes += [
            f"torch {torch.__version__}, triton on {card}, weights {self.weights_precision}, KV {self.kv_precision}",
            "kernel table: " + (", ".join(table.sources) or "none for this card, guesses are used (headrace tune)"),
            f"warm-up and {runner.graphs.count} decode graphs took {warm_s:.2f} s ({runner.graphs.capture_s:.2f} s capture)"
            if self._graphs
            else "decode graphs are off",
            *([] if self._compilers is None else [self._compilers.note()]),
            *attention,
            *(
                [f"products of more than 32 rows: {decoder.specialized()}", decoder.library.note()]
                if self.weights_precision == self._computed
                else []
            ),
            "programmatic dependent launch is " + ("on" if pdl else "off"),
            f"buffers of split work, tables and rotations: {format_bytes(decoder.workspace_bytes)}",
        ]
        # What the start has made stays, and so do the nodes of the prefix tree, of which there are as many as blocks: a
        # collection that walks through them takes as long as several steps (31 to 73 ms were seen). Rings of short-lived
        # objects fall to the younger generations.
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, 1000)
        return CudaExecutor(runner, device)

    def _staging(self, decoder: Decoder, limits: Limits) -> list[MemoryItem]:
        if decoder.staged is None:
            return []
        how = "as measured on this card" if decoder.tuned_for_codes else "by a guess, as none was tuned for this card"
        self._notes.append(f"KV {self.kv_precision}: attention of decode steps is cut {how}")
        predicted = kv_staging_bytes(self.spec, self.kv_precision, limits.max_num_seqs, self._computed)
        return [MemoryItem("kv_staging", predicted, decoder.staged.nbytes)]

    def _choose_attention(self, decoder: Decoder, layout: CacheLayout, sms: int) -> list[str]:
        """Give the decoder flashinfer's planner if that was asked for; notes that say which attention runs, and why."""
        if self._attention != "flashinfer":
            why = (
                "as asked for"
                if self._attention == "triton"
                else "the default; attention=flashinfer takes that package's"
            )
            tiles = "warp-specialized (Hopper)"
            if decoder.why_not_hopper is not None:
                tiles = f"plain tiles, since {decoder.why_not_hopper}"
            return [
                f"attention: headrace's own kernels ({why})",
                f"attention of long prompts: {tiles}",
                f"attention of decode steps: {decoder.bulk.note()}",
            ]
        begin = time.perf_counter()
        decoder.planner = flashinfer.FlashInfer(
            self.spec, layout, _DTYPES[self._computed], self._device, rows=decoder.rows, sms=sms,
            blocks=decoder.tables.shape[-1], graphs=self._graphs,
        )  # fmt: skip
        return [
            f"attention: flashinfer {decoder.planner.version}, as asked for; "
            f"its kernels were ready after {time.perf_counter() - begin:.1f} s",
            "with flashinfer, steps with prompts are launched kernel by kernel, and each request reads a shared prefix itself",
        ]

    def memory(self) -> tuple[MemoryItem, ...]:
        return tuple(self._memory)

    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def _grammar_tokens(self) -> GrammarTokens:
        from headrace.text.tokenizer import Tokenizer

        files = self._files
        tokenizer = (
            Tokenizer.from_gguf(files.gguf().metadata) if files.kind == "gguf" else Tokenizer.from_folder(files.root)
        )
        return GrammarTokens.of(tokenizer, self.spec.eos_token_ids or tokenizer.eos_token_ids)


class CudaExecutor:
    """Launches steps on the calling thread; the device runs them in order while the host plans the next."""

    def __init__(self, runner: Runner, device: torch.device) -> None:
        self.runner = runner
        self._device = device
        self._closed = False
        self._threads: set[int] = set()

    def submit(self, plan: StepPlan) -> CudaStep:
        if self._closed:
            raise RuntimeError("the executor is closed")
        if self._device.type == "cuda" and (ident := threading.get_ident()) not in self._threads:
            torch.cuda.set_device(self._device)
            self._threads.add(ident)
        return self.runner.submit(plan)

    def reset(self) -> None:
        self.runner.reset()

    def close(self) -> None:
        """Wait for what was launched."""
        if not self._closed:
            self._closed = True
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)


def _computed(config: EngineConfig, form: Format | None) -> str:
    """The type of activations and of whatever is not quantized; plain weights are computed with as they are stored."""
    asked = dict(config.options).get("activations", "")
    if form is None:
        plain = _chosen("weights", config.weights, "bf16", _DTYPES)
        if asked not in ("", plain):
            raise InvalidInput(f"weights {plain} are computed with in {plain}", field="options.activations")
        return plain
    return _chosen("options.activations", asked or "auto", "bf16", _DTYPES)


def _notes(source: TensorSource, form: Format | None, computed: str, quantized: Quantized) -> list[str]:
    if form is None:
        return []
    origin = f"as the {source.method} checkpoint holds them" if isinstance(source, QuantizedSource) else "when loaded"
    found = [f"matrices quantized to {form.name} {origin}; activations and the rest {computed}"]
    found += [
        f"{name} and its like are dequantized whole in every product, which is slow: {why}"
        for why, name in quantized.unfit.items()
    ]
    return found


def _chosen(field: str, value: str, automatic: str, known: Iterable[str]) -> str:
    if value == "auto":
        return automatic
    if value not in known:
        raise InvalidInput(
            f"the cuda backend cannot use {field} {value!r}", field=field, remedy="choose one of: " + ", ".join(known)
        )
    return value
