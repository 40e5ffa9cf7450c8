"""What a quality run found, as one JSON object."""

from __future__ import annotations

import msgspec

from headrace.base.bootstrap import Interval


class Speed(msgspec.Struct, frozen=True):
    """Tokens per second of one sequence alone: reading a prompt, and writing an answer."""

    prompt_tokens_per_s: Interval
    decode_tokens_per_s: Interval
    prompt_tokens: int
    decode_tokens: int
    repeats: int


class FormatQuality(msgspec.Struct, frozen=True):
    """One format of weights and KV, as it was asked for and as the backend calls it.

    Every figure has a 95 % interval from resampled windows, prompts or questions, and a share that is 0 or 1 Wilson's interval of as many
    independent trials. `perplexity_ratio`, `kl_nats` (per
    token), `flip_rate` (share of tokens whose most likely one differs) and `agreement_tokens` (greedy tokens until the
    first that differs, at most the report's `agreement_limit`) compare with the reference; `agreement_whole` is the share
    of prompts that never differed, `changed_picks` that of questions. Accuracies are of the questions, by log-likelihood
    and by log-likelihood per byte.
    """

    backend: str
    asked_weights: str
    asked_kv: str
    weights: str
    kv: str
    weight_bytes: int
    kv_bytes_per_token: int
    perplexity: Interval
    perplexity_ratio: Interval
    kl_nats: Interval
    flip_rate: Interval
    agreement_tokens: Interval
    agreement_whole: Interval
    accuracy: Interval
    accuracy_normalized: Interval
    changed_picks: Interval
    speed: Speed | None = None
    notes: tuple[str, ...] = ()


class QualityReport(msgspec.Struct, frozen=True):
    """A reference and the formats that were compared with it, on the same windows, prompts and questions."""

    model: str
    text: str
    window: int
    stride: int
    windows: int
    scored_tokens: int
    prompts: int
    prompt_tokens: int
    agreement_limit: int
    questions: int
    reference: str
    unquantized: FormatQuality
    formats: tuple[FormatQuality, ...]


def as_text(report: QualityReport) -> str:
    """A table for a terminal."""
    lines = [
        f"{report.model}: {report.scored_tokens:,} tokens of {report.text} in {report.windows} windows of {report.window}, "
        f"stride {report.stride}; {report.prompts} greedy answers of {report.agreement_limit} tokens; "
        f"{report.questions} questions",
        f"reference: {report.reference}",
        "",
    ]
    head = (
        "format",
        "weights",
        "KV/token",
        "perplexity",
        "ratio",
        "KL nats",
        "flips",
        "agreement",
        "accuracy",
        "normed",
    )
    found = (report.unquantized, *report.formats)
    rows = [head, *(_row(f) for f in found)]
    if any(f.speed is not None for f in found):
        speeds = [("prompt tok/s", "answer tok/s"), *(_speed(f.speed) for f in found)]
        rows = [(*row, *speed) for row, speed in zip(rows, speeds, strict=True)]
    wide = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip() for row in rows]
    lines.append("95 % intervals in brackets: " + _legend(report))
    timed = next((f.speed for f in found if f.speed is not None), None)
    if timed is not None:
        lines.append(
            f"speed: one sequence alone, a prompt of {timed.prompt_tokens} tokens and an answer of {timed.decode_tokens}, "
            f"{timed.repeats} times"
        )
    return "\n".join(lines)


def _legend(report: QualityReport) -> str:
    return f"moving-block bootstrap over windows, prompts (of {report.prompt_tokens} tokens) and questions"


def _row(f: FormatQuality) -> tuple[str, ...]:
    return (
        _name(f),
        f"{f.weight_bytes / 1e6:,.1f} MB",
        f"{f.kv_bytes_per_token:,} B",
        spread(f.perplexity, ".3f"),
        spread(f.perplexity_ratio, ".4f"),
        spread(f.kl_nats, ".2e"),
        spread(f.flip_rate, ".2%"),
        spread(f.agreement_tokens, ".1f"),
        spread(f.accuracy, ".1%"),
        spread(f.accuracy_normalized, ".1%"),
    )


def _speed(found: Speed | None) -> tuple[str, str]:
    if found is None:
        return "", ""
    return spread(found.prompt_tokens_per_s, ",.0f"), spread(found.decode_tokens_per_s, ",.1f")


def _name(f: FormatQuality) -> str:
    parts = [(f.asked_weights, f.weights), (f.asked_kv, f.kv)]
    return f"{f.backend} " + " / ".join(a if a == b else f"{a} = {b}" for a, b in parts)


def spread(interval: Interval, form: str) -> str:
    """`12.3 [11.9, 12.8]`."""
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"
