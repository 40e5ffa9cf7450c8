"""A model in memory, as the torch backend holds it, and the executor that runs its steps on a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headrace.base.errors import InvalidInput
from headrace.control.api import MemoryItem
from headrace.engine.attention import ATTENTION
from headrace.engine.attention._contract import AttentionBackend
from headrace.engine.backend import Formats, Limits, LogitsWatch
from headrace.engine.grammars import Grammars
from headrace.engine.kv_formats import names as kv_names
from headrace.engine.kv_formats import pool_class
from headrace.engine.layers.decoder import Decoder, build_decoder
from headrace.engine.layers.linear import Linear, MappedEmbedding, tensorizer
from headrace.engine.memory import available_bytes, keep_large_buffers, physical_cores
from headrace.engine.models import MODELS
from headrace.engine.profile import StepProfile, profiled
from headrace.engine.quant.formats import Format
from headrace.engine.quant.formats import names as format_names
from headrace.engine.quant.loading import QuantLoader, loading_notes, policy_of, wanted_format
from headrace.engine.runner import Runner
from headrace.engine.step_thread import ThreadExecutor
from headrace.engine.steps import Steps
from headrace.engine.weights.checkpoint import Checkpoint
from headrace.engine.weights.open import open_weights
from headrace.spec.accounting import activation_bytes, kv_staging_bytes, weight_bytes
from headrace.spec.cache import CacheLayout
from headrace.spec.config import EngineConfig
from headrace.spec.locate import ModelFiles
from headrace.spec.model import ModelSpec
from headrace.text.grammar import GrammarTokens

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WEIGHTS = ("fp32", "bf16")
_OPTIONS = ("profile", "activations")


def offered() -> Formats:
    """Weights and KV that this backend computes with."""
    return Formats((*_WEIGHTS, *format_names()), kv_names())


def load(files: ModelFiles, config: EngineConfig) -> TorchModel:
    """Read the weights and choose the attention backend. Raises CorruptCheckpoint, UnsupportedModel or InvalidInput."""
    kv = _chosen("kv", config.kv, kv_names())
    for name, _ in config.options:
        if name not in _OPTIONS:
            raise InvalidInput(
                f"the torch backend has no option {name!r}", field="options", remedy="known: " + ", ".join(_OPTIONS)
            )
    available = available_bytes()
    notes = []
    if not keep_large_buffers():
        notes.append("malloc is not glibc's: large buffers may be mapped again in every step")
    threads = config.threads or physical_cores()
    # Only the step thread runs operators on several threads: libgomp counts the workers of every thread's pool, and with
    # more of them than cores a worker sleeps between two operators instead of spinning, tens of microseconds each time.
    torch.set_num_threads(1)
    spec = files.spec()
    source = open_weights(files, config)
    form = wanted_format(config.weights, source, spec, _WEIGHTS)
    computed = _computed(config, form)
    weights = computed if form is None else form.name
    device, dtype = torch.device("cpu"), _DTYPES[computed]
    architecture = MODELS.get(spec.model_type)
    names = architecture.gguf if files.kind == "gguf" and config.load_format != "dummy" else architecture.hf
    with torch.inference_mode():
        checkpoint = Checkpoint(source)
        tensorize = tensorizer(dtype, device)
        loader = None if form is None else QuantLoader(checkpoint, form, policy_of(source), tensorize)
        decoder = build_decoder(spec, names, checkpoint, tensorize, device, dtype, threads, loader)
        predicted = weight_bytes(spec, computed).total if loader is None else loader.bytes_predicted(spec, computed)
    attention = _attention(config.attention, kv, decoder, device, dtype)
    notes += [f"torch {torch.__version__} on {threads} threads, weights {weights}, KV {kv}, attention {attention.name}"]
    notes += _weight_notes(decoder, computed)
    notes += [] if loader is None else loading_notes(loader, source, computed)
    profile = StepProfile() if dict(config.options).get("profile", "0") not in ("", "0", "false") else None
    if profile is not None:
        attention = profiled(decoder, attention, profile)
    return TorchModel(
        files, spec, decoder, attention, weights, computed, kv, threads, available, predicted, tuple(notes), profile
    )


class TorchModel:
    """See `headrace.engine.backend.LoadedModel`."""

    def __init__(
        self,
        files: ModelFiles,
        spec: ModelSpec,
        decoder: Decoder,
        attention: AttentionBackend,
        weights_precision: str,
        activation_precision: str,
        kv_precision: str,
        threads: int,
        available: int,
        predicted_bytes: int,
        notes: tuple[str, ...],
        profile: StepProfile | None,
    ) -> None:
        self.spec = spec
        self.weights_precision = weights_precision
        self.activation_precision = activation_precision
        self.kv_precision = kv_precision
        self.device = "cpu"
        self.profile = profile
        self._files = files
        self._decoder = decoder
        self._attention = attention
        self._threads = threads
        self._available = available
        self._notes = notes
        self._memory = [MemoryItem("weights", predicted_bytes, decoder.nbytes)]

    def kv_budget_bytes(self, memory_fraction: float, max_num_seqs: int, max_batched_tokens: int) -> int:
        """`memory_fraction` of what was available before loading, less weights and the modelled activation peak."""
        activations = activation_bytes(
            self.spec, max_batched_tokens, max_num_seqs, activation_precision=self.activation_precision
        )
        staging = kv_staging_bytes(self.spec, self.kv_precision, max_num_seqs, self.activation_precision)
        return int(self._available * memory_fraction) - self._decoder.nbytes - activations - staging

    def executor(self, layout: CacheLayout, limits: Limits, watch: LogitsWatch | None = None) -> ThreadExecutor:
        grammars = Grammars(self.spec.vocab_size, self._grammar_tokens)
        with torch.inference_mode():
            runner = Runner(
                self._decoder,
                self._attention,
                layout,
                limits,
                _DTYPES[self.activation_precision],
                torch.device("cpu"),
            )
        self._memory.append(MemoryItem("kv_pool", layout.bytes_per_block * limits.num_blocks, runner.pool.nbytes))
        if runner.pool.staging_bytes:
            staging = kv_staging_bytes(self.spec, self.kv_precision, limits.max_num_seqs, self.activation_precision)
            self._memory.append(MemoryItem("kv_staging", staging, runner.pool.staging_bytes))
        steps = Steps(runner, layout, limits, grammars, watch)
        return ThreadExecutor(steps.step, limits.max_num_seqs, name="headrace-torch", around=self._on_thread)

    @contextmanager
    def _on_thread(self) -> Iterator[None]:
        torch.set_num_threads(self._threads)  # OpenMP keeps the number per calling thread
        with torch.inference_mode():
            yield

    def memory(self) -> tuple[MemoryItem, ...]:
        return tuple(self._memory)

    def notes(self) -> tuple[str, ...]:
        return self._notes

    def _grammar_tokens(self) -> GrammarTokens:
        from headrace.text.tokenizer import Tokenizer

        files = self._files
        tokenizer = (
            Tokenizer.from_gguf(files.gguf().metadata) if files.kind == "gguf" else Tokenizer.from_folder(files.root)
        )
        return GrammarTokens.of(tokenizer, self.spec.eos_token_ids or tokenizer.eos_token_ids)


def _chosen(field: str, value: str, known: tuple[str, ...]) -> str:
    if value == "auto":
        return known[0]
    if value not in known:
        raise InvalidInput(
            f"the torch backend cannot use {field} {value!r}",
            field=field,
            remedy="choose one of: auto, " + ", ".join(known),
        )
    return value


def _computed(config: EngineConfig, form: Format | None) -> str:
    """The type of activations and of whatever is not quantized; plain weights are computed with as they are stored."""
    asked = dict(config.options).get("activations", "")
    if form is None:
        plain = _chosen("weights", config.weights, _WEIGHTS)
        if asked not in ("", plain):
            raise InvalidInput(f"weights {plain} are computed with in {plain}", field="options.activations")
        return plain
    return _chosen("options.activations", asked or "auto", _WEIGHTS)


def _attention(name: str, kv: str, decoder: Decoder, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    if (only := pool_class(kv).attention) is not None:
        if name != "auto":
            raise InvalidInput(f"KV {kv} has an attention of its own, not {name}", field="attention", remedy="use auto")
        return only
    backend: AttentionBackend = ATTENTION.get("sdpa" if name == "auto" else name)
    for i, kind in enumerate(decoder.kinds):
        if (reason := backend.unsupported(kind, device, dtype)) is not None:
            raise InvalidInput(f"attention backend {name} cannot compute layer {i}: {reason}", field="attention")
    return backend


def _weight_notes(decoder: Decoder, computed: str) -> list[str]:
    notes = []
    plain = [part for part in decoder.linears() if isinstance(part, Linear)]
    if plain and not any(part.packed for part in plain):
        notes.append("linear layers are not packed: oneDNN is unavailable or would pad these sizes")
    if computed == "fp32" and not decoder.final_norm.native:
        notes.append("norms take five operators each: headrace-native, which has them in one, is not installed")
    if isinstance(decoder.embedding, MappedEmbedding):
        notes.append("tied head packed once; embedding rows are read from the mapped checkpoint")
    elif decoder.spec.tied_embeddings:
        notes.append("tied head shares the embedding table and is not packed")
    return notes
