"""The measurement: the reference first, then each format on the same windows, prompts and questions."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.bootstrap import Interval, ratio_interval, share_interval
from headrace.base.errors import InvalidInput
from headrace.engine.backend import LoadedModel
from headrace.engine.launch import BACKENDS, choose_backend
from headrace.engine.quality.choices import Candidate, Picks, Question, candidates, picks
from headrace.engine.quality.distance import LogitsFile, distance
from headrace.engine.quality.evaluate import Evaluator, Logits
from headrace.engine.quality.report import FormatQuality, QualityReport, Speed
from headrace.engine.quality.windows import Window, windows
from headrace.spec.accounting import kv_bytes_per_token
from headrace.spec.config import EngineConfig
from headrace.spec.locate import ModelFiles, locate
from headrace.spec.precision import ALIASES, KV_ALIASES
from headrace.text.load import load_tokenizer
from headrace.text.tokenizer import Tokenizer

log = logging.getLogger("headrace.engine")

Array = npt.NDArray[np.float64]

UNQUANTIZED: dict[str, tuple[dict[str, Any], str]] = {
    "torch": (
        {"weights": "fp32", "kv": "fp32", "options": ()},
        "weights as stored, computed and cached in fp32 by torch",
    ),
    "native": (
        {"weights": "auto", "kv": "fp32", "options": (("activations", "fp32"),)},
        "weights as stored, fp32 activations and fp32 KV in the native backend",
    ),
    "cuda": (
        {"weights": "fp32", "kv": "fp32", "options": ()},
        "weights as stored, computed and cached in fp32 on the GPU",
    ),
}
"""By backend: what makes it compute the model as it is stored, and how that is said."""


def built_in_text() -> str:
    """Chapters I to III of *Alice's Adventures in Wonderland* (1865, public domain)."""
    return resources.files("headrace.engine.quality").joinpath("alice.txt").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much is measured. `tokens`: most tokens of the text; `prompts` pieces of it, of `prompt_tokens` each, are
    continued greedily for `agreement` tokens. `speed_repeats`: 0 leaves speed out."""

    window: int = 512
    stride: int = 256
    tokens: int = 8192
    prompts: int = 32
    prompt_tokens: int = 48
    agreement: int = 64
    speed_repeats: int = 0

    def __post_init__(self) -> None:
        for name, least in (("window", 3), ("tokens", 2), ("prompts", 1), ("prompt_tokens", 1), ("agreement", 1)):
            if getattr(self, name) < least:
                raise InvalidInput(f"must be at least {least}, not {getattr(self, name)}", field=name)
        if self.speed_repeats < 0:
            raise InvalidInput(f"must not be negative, not {self.speed_repeats}", field="speed_repeats")


@dataclass(frozen=True, slots=True)
class Material:
    """What every format is given: windows of the text, prompts, and questions with their candidates."""

    windows: list[Window]
    prompts: list[tuple[int, ...]]
    questions: Sequence[Question]
    candidates: list[Candidate]

    @property
    def first_rows(self) -> list[int]:
        """Row of the reference's logits that each window's first scored token has."""
        return [0, *np.cumsum([w.scored for w in self.windows]).tolist()]


@dataclass(slots=True)
class _Run:
    """Raw results of one format. Per window: negative log-likelihood, KL and flips, summed over its scored tokens."""

    nll: Array
    kl: Array
    flips: Array
    answers: list[list[int]]
    picks: Picks
    model: LoadedModel
    config: EngineConfig
    backend: str
    speed: Speed | None


def prepare(text: str, questions: Sequence[Question], tokenizer: Tokenizer, settings: Settings) -> Material:
    """Cut the text and tokenize the questions. Raises InvalidInput where the text is too short."""
    prefix = special_prefix(tokenizer)
    ids = tokenizer.encode(text, add_special=False, parse_special=False)[: settings.tokens]
    found = windows(ids, settings.window, settings.stride, prefix)
    last = len(ids) - settings.prompt_tokens
    if last < 0:
        raise InvalidInput(
            f"the text has {len(ids)} tokens, a prompt needs {settings.prompt_tokens}", field="text",
            remedy="give a longer one or lower prompt_tokens",
        )  # fmt: skip
    starts = np.unique(np.linspace(0, last, settings.prompts).astype(int)).tolist()
    prompts = [(*prefix, *ids[at : at + settings.prompt_tokens]) for at in starts]
    return Material(found, prompts, questions, candidates(questions, tokenizer))


def special_prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that the tokenizer puts before a text, such as BOS."""
    with_special, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special=False)
    at = next((k for k in range(len(with_special)) if with_special[k : k + len(plain)] == plain), 0)
    return tuple(with_special[:at])


def measure(
    config: EngineConfig,
    formats: Sequence[tuple[str, str]],
    text: str,
    text_name: str,
    questions: Sequence[Question],
    settings: Settings,
    *,
    reference: str = "auto",
    scratch: Path,
    files: ModelFiles | None = None,
    each: Callable[[QualityReport], None] | None = None,
) -> QualityReport:
    """Compare `formats`, (weights, KV) as in `EngineConfig`, with the unquantized model on backend `reference`.

    The reference's logits, 4 bytes per scored token and entry of the vocabulary, lie in an unnamed file in `scratch`.
    One model is in memory at a time. `each` is called with the report so far after every format. Raises what loading
    raises, and InvalidInput for a text or sizes that do not go together.
    """
    files = files or locate(config.model, revision=config.revision)
    spec = files.spec()
    if settings.window > spec.max_context:
        raise InvalidInput(
            f"{settings.window} is beyond the model's context of {spec.max_context}", field="window", remedy="lower it"
        )
    material = prepare(text, questions, load_tokenizer(files), settings)
    base, said = unquantized(config, files, reference)

    def so_far() -> QualityReport:
        return QualityReport(
            model=files.name,
            text=text_name,
            window=settings.window,
            stride=settings.stride,
            windows=len(material.windows),
            scored_tokens=material.first_rows[-1],
            prompts=len(material.prompts),
            prompt_tokens=settings.prompt_tokens,
            agreement_limit=settings.agreement,
            questions=len(questions),
            reference=said,
            unquantized=reports[0],
            formats=tuple(reports[1:]),
        )

    kept = LogitsFile(material.first_rows[-1], spec.vocab_size, scratch)
    try:
        log.info("reference: %s", said)
        first = _run(base, files, material, settings, kept, writing=True)
        reports = [_report(first, first, material)]
        del first.model
        gc.collect()
        for weights, kv in formats:
            log.info("weights %s, KV %s", weights, kv)
            found = _run(replace(config, weights=weights, kv=kv), files, material, settings, kept, writing=False)
            reports.append(_report(found, first, material))
            del found
            gc.collect()
            if each is not None:
                each(so_far())
    finally:
        kept.close()
    return so_far()


def measure_speed(config: EngineConfig, text: str, settings: Settings, files: ModelFiles | None = None) -> Speed:
    """One sequence alone, as in `measure`, without any loss: a prompt of one window of the text, and a greedy answer."""
    if not settings.speed_repeats:
        raise InvalidInput("must be at least 1", field="speed_repeats")
    files = files or locate(config.model, revision=config.revision)
    material = prepare(text, (), load_tokenizer(files), settings)
    backend, _ = choose_backend(config, files)
    with _evaluator(backend.load(files, config), material, settings) as evaluator:
        found = _speed(evaluator, material, settings)
    assert found is not None
    return found


def expand(config: EngineConfig, files: ModelFiles, weights: Sequence[str], kv: Sequence[str]) -> list[tuple[str, str]]:
    """Every pair of `weights` and `kv`; `all` stands for whatever the backend of `config` offers.

    A name that it does not offer is an InvalidInput here already, before the reference is computed.
    """
    backend = choose_backend(config, files)[0]
    offered = backend.formats()
    chosen_weights = _named(backend.name, "weights", weights, offered.weights, ALIASES)
    chosen_kv = _named(backend.name, "kv", kv, offered.kv, KV_ALIASES)
    return [(w, k) for w in chosen_weights for k in chosen_kv]


def _named(
    backend: str, field: str, asked: Sequence[str], offered: Sequence[str], aliases: Mapping[str, str]
) -> Sequence[str]:
    if "all" in asked:
        return offered
    for name in asked:
        key = name.strip().lower().replace("-", "_")
        if aliases.get(key, key) not in ("auto", *offered):
            raise InvalidInput(
                f"the {backend} backend cannot use {field} {name!r}",
                field=field,
                remedy="another --backend may, else choose one of: all, auto, " + ", ".join(offered),
            )
    return asked


def unquantized(config: EngineConfig, files: ModelFiles, backend: str) -> tuple[EngineConfig, str]:
    """The options that compute the model as stored, and their description; `auto` is torch, native where that is missing."""
    if backend not in ("auto", *UNQUANTIZED):
        raise InvalidInput(
            f"unknown reference {backend!r}", field="reference", remedy="choose one of: auto, " + ", ".join(UNQUANTIZED)
        )
    device = config.device if backend == "cuda" else "cpu"
    why = ""
    for name in (backend,) if backend != "auto" else ("torch", "native"):
        changes, said = UNQUANTIZED[name]
        changed = replace(config, backend=name, device=device, attention="auto", **changes)
        if name not in BACKENDS.names():
            reason: str | None = "it is not installed"
        else:
            reason = BACKENDS.get(name).unavailable(files, changed)
        if reason is None:
            return changed, said + (f" ({why})" if why else "")
        why = f"{name} was not used: {reason}"
    raise InvalidInput(f"no unquantized reference: {why}", field="reference")


def _run(
    config: EngineConfig,
    files: ModelFiles,
    material: Material,
    settings: Settings,
    kept: LogitsFile,
    *,
    writing: bool,
) -> _Run:
    backend, notes = choose_backend(config, files)
    for note in notes:
        log.info("%s", note)
    model = backend.load(files, config)
    with _evaluator(model, material, settings) as evaluator:
        count = len(material.windows)
        kl, flips = np.zeros(count), np.zeros(count)
        first_rows = material.first_rows

        def visit(i: int, position: int, logits: Logits) -> None:
            """Logits of `position` predict the next token, which is scored from the window's `first` on."""
            skipped = max(0, material.windows[i].first - 1 - position)
            if skipped >= len(logits):
                return
            scored = logits[skipped:]
            at = first_rows[i] + position + skipped - (material.windows[i].first - 1)
            if writing:
                kept.write(at, scored)
                return
            apart = distance(kept.read(at, len(scored)), scored)
            kl[i] += apart.kl.sum()
            flips[i] += apart.flipped.sum()

        scored = evaluator.score([w.tokens for w in material.windows], visit)
        nll = np.array([-row[w.first - 1 :].sum() for w, row in zip(material.windows, scored, strict=True)])
        answers = evaluator.greedy(material.prompts, settings.agreement).tokens
        chosen = picks(material.candidates, evaluator.score([c.tokens for c in material.candidates]))
        speed = _speed(evaluator, material, settings)
    return _Run(nll, kl, flips, answers, chosen, model, config, backend.name, speed)


@contextmanager
def _evaluator(model: LoadedModel, material: Material, settings: Settings) -> Iterator[Evaluator]:
    longest = max(
        [len(p) + settings.agreement for p in material.prompts]
        + [len(c.tokens) for c in material.candidates]
        + [settings.window]
    )
    evaluator = Evaluator(model, max(2048, longest))
    try:
        yield evaluator
    finally:
        evaluator.close()


def _speed(evaluator: Evaluator, material: Material, settings: Settings) -> Speed | None:
    """One sequence alone, after one round that is not counted."""
    if not settings.speed_repeats:
        return None
    prompt = material.windows[0].tokens
    short, count = prompt[: settings.prompt_tokens], settings.agreement
    evaluator.greedy([prompt], 1)
    reading = [evaluator.greedy([prompt], 1).prompt_s for _ in range(settings.speed_repeats)]
    evaluator.greedy([short], count)
    writing = [evaluator.greedy([short], count).decode_s for _ in range(settings.speed_repeats)]
    many = np.ones(settings.speed_repeats)
    return Speed(
        prompt_tokens_per_s=ratio_interval(len(prompt) * many, np.array(reading)),
        decode_tokens_per_s=ratio_interval((count - 1) * many, np.array(writing)),
        prompt_tokens=len(prompt),
        decode_tokens=count - 1,
        repeats=settings.speed_repeats,
    )


def _report(run: _Run, reference: _Run, material: Material) -> FormatQuality:
    scored = np.array([float(w.scored) for w in material.windows])
    until = np.array([_same(a, b) for a, b in zip(reference.answers, run.answers, strict=True)], np.float64)
    whole = np.array([a == b for a, b in zip(reference.answers, run.answers, strict=True)], np.float64)
    right = np.array([q.answer for q in material.questions])
    each, prompts = np.ones(len(right)), np.ones(len(until))
    weights = sum(m.actual_bytes for m in run.model.memory() if m.name == "weights")
    # The reference agrees with itself for certain.
    agreeing = ratio_interval if run is reference else share_interval
    return FormatQuality(
        backend=run.backend,
        asked_weights=run.config.weights,
        asked_kv=run.config.kv,
        weights=run.model.weights_precision,
        kv=run.model.kv_precision,
        weight_bytes=weights,
        kv_bytes_per_token=kv_bytes_per_token(run.model.spec, run.model.kv_precision),
        perplexity=_exp(ratio_interval(run.nll, scored)),
        perplexity_ratio=_exp(ratio_interval(run.nll - reference.nll, scored)),
        kl_nats=ratio_interval(run.kl, scored),
        flip_rate=agreeing(run.flips, scored),
        agreement_tokens=ratio_interval(until, prompts),
        agreement_whole=agreeing(whole, prompts),
        accuracy=share_interval((run.picks.raw == right).astype(np.float64), each),
        accuracy_normalized=share_interval((run.picks.normalized == right).astype(np.float64), each),
        changed_picks=agreeing((run.picks.normalized != reference.picks.normalized).astype(np.float64), each),
        speed=run.speed,
        notes=run.model.notes(),
    )


def _same(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens until the first that differs."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _exp(interval: Interval) -> Interval:
    return Interval(*(float(np.exp(x)) for x in (interval.value, interval.low, interval.high)))
