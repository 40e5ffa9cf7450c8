"""Agents that branch: k proposals from one expert prompt, then a review and a score of each, round after round."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from headrace.base.errors import InvalidInput
from headrace.bench.prompts import PromptWriter
from headrace.bench.traffic import Call, IntRange, Message, Script, Session, Stage, TrafficContext, WorkloadKind

_ROLE = "You are an expert engineer. Answer with one concrete proposal and its reasons. Background:"
_REVIEW = "Review the proposal above. Name its weakest point, then end with a line 'Score: N', N from 1 to 10."
_AGAIN = "Improve on it."
_FIXED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Options:
    """`branches` proposals per round, `rounds`; tokens of the expert `system` prompt (one for all agents), of the
    `task` (one per agent), of a proposal (`osl`) and of a review (`review`); `tool`: seconds an agent waits for a tool
    between stages, uniform up to twice that.
    """

    branches: int = 4
    rounds: int = 2
    system: int = 512
    task: int = 128
    osl: IntRange = IntRange(64, 128)
    review: IntRange = IntRange(24, 48)
    tool: float = 0.2


def sessions(options: Options, context: TrafficContext) -> Iterator[Session]:
    if options.branches < 1 or options.rounds < 1:
        raise InvalidInput("must be at least 1", field="--set branches" if options.branches < 1 else "--set rounds")
    kept = options.rounds * (options.osl.high + options.review.high)
    prompt = options.system + options.task + kept + _FIXED_TOKENS * (options.rounds + 1)
    context.fitting.scale_to(prompt + options.review.high)
    for index in count():
        if context.fitting.fit(prompt, options.review.high) is None:
            return
        yield _session(index, options, context)


def _session(index: int, options: Options, context: TrafficContext) -> Session:
    scaled, writer = context.fitting.scaled, context.writer

    def script() -> Script:
        source = context.shape(index)
        expert = f"{_ROLE} {writer.text(context.words('system'), scaled(options.system))}"
        task = writer.unique_text(context.words("task", index), scaled(options.task), index, context.salt)
        base = [Message("system", expert), Message("user", f"Task: {task}")]
        answered = 0
        for turn in range(options.rounds):
            proposals = [scaled(options.osl.draw(source)) for _ in range(options.branches)]
            reviews = [scaled(options.review.draw(source)) for _ in range(options.branches)]
            pauses = [source.uniform(0.0, 2 * options.tool) for _ in range(2)]
            prompts = [_ask(base, k) for k in range(options.branches)]
            sizes = [_size(p, answered, writer) for p in prompts]
            known = _size(tuple(base), answered, writer)
            first = known - writer.tokens_of(_AGAIN) - writer.message_tokens if turn else 0
            if index and not turn:
                first = _size((base[0],), 0, writer)
            asked = zip(prompts, sizes, proposals, strict=True)
            texts = yield Stage(
                tuple(Call(p, size, n, known if k else first) for k, (p, size, n) in enumerate(asked)),
                pause_s=pauses[0] if turn else 0.0,
            )
            judged = [
                (*p, Message("assistant", t or " "), Message("user", _REVIEW))
                for p, t in zip(prompts, texts, strict=True)
            ]
            added = [n + writer.tokens_of(_REVIEW) + 2 * writer.message_tokens for n in proposals]
            scores = yield Stage(
                tuple(
                    Call(p, size + more, n, size + proposed)
                    for p, size, more, proposed, n in zip(judged, sizes, added, proposals, reviews, strict=True)
                ),
                pause_s=pauses[1],
            )
            best = max(range(options.branches), key=lambda k: (score_of(scores[k]), -k))
            base = [*judged[best], Message("assistant", scores[best] or " "), Message("user", _AGAIN)]
            answered += proposals[best] + reviews[best]

    return Session(index, options.rounds * options.branches * 2, script)


def _size(messages: tuple[Message, ...], answered: int, writer: PromptWriter) -> int:
    """Tokens of a prompt: our own words, and `answered` tokens for the server's answers in it."""
    ours = sum(writer.tokens_of(m.content) for m in messages if m.role != "assistant")
    return ours + answered + writer.template_tokens + writer.message_tokens * (len(messages) - 1)


def _ask(base: list[Message], branch: int) -> tuple[Message, ...]:
    """The base with the branch's own line at the end of the last user message, so that all before it is shared."""
    return (*base[:-1], Message("user", f"{base[-1].content} Give proposal number {branch + 1}."))


def score_of(review: str) -> int:
    """The last number from 1 to 10 after the word 'score', 0 where there is none."""
    found = [int(n) for n in re.findall(r"[Ss]core\D{0,3}(\d+)", review)]
    return next((n for n in reversed(found) if 1 <= n <= 10), 0)


WORKLOAD = WorkloadKind("agents that propose in branches, review and score, with tool pauses", Options, sessions)
