"""The shape of traffic: a session is a script of stages, a stage is calls sent together, a call is one request."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from headrace.base.errors import InvalidInput
from headrace.bench.prompts import PromptWriter

TooLong = Literal["skip", "clip", "scale"]


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `prompt`: chat messages, a text, or token ids (offline and completions only).

    `prompt_tokens`: what was declared, template included; `shared_tokens`: how many of them, at the start, an earlier
    request of the same run may have left in a prefix cache.
    """

    prompt: tuple[Message, ...] | str | tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """Calls sent at the same moment: `pause_s` after the stage before has ended, and not before `not_before_s`
    (seconds since the run's start; honoured only when the trace's own arrivals are replayed)."""

    calls: tuple[Call, ...]
    pause_s: float = 0.0
    not_before_s: float | None = None


Script = Generator[Stage, list[str], None]


@dataclass(frozen=True, slots=True)
class Session:
    """A user, agent or single request. `script` yields stages and is sent the reply texts of each.

    `num_calls` is known in advance, so that request numbers do not depend on what the server answers.
    `arrival_s`: when a trace says it starts, seconds since the first; None where the workload has no arrivals.
    """

    index: int
    num_calls: int
    script: Callable[[], Script]
    arrival_s: float | None = None


@dataclass(slots=True)
class Fitting:
    """How requests longer than the model's context are treated, and how many there were.

    skip: left out · clip: the prompt is cut · scale: every length of the workload is multiplied by one factor, so that
    `longest` fits and the shape stays. `factor` also carries a scale that the user asked for. Lengths are tokens.
    """

    max_context: int | None
    policy: TooLong = "skip"
    factor: float = 1.0
    reserve: int = 0
    skipped: int = 0
    clipped: int = 0
    kept: int = 0

    def scale_to(self, longest: int) -> None:
        """With policy `scale`, shrink the factor until a request of `longest` tokens (before scaling) fits."""
        if self.policy == "scale" and self.max_context:
            self.factor = min(self.factor, (self.max_context - self.reserve) / max(1, longest))

    def scaled(self, tokens: int) -> int:
        return max(1, int(tokens * self.factor))

    @property
    def hopeless(self) -> bool:
        """Whether so many requests in a row were left out that an endless workload will never send one."""
        return self.skipped > 10_000 and not self.kept

    def fit(self, prompt: int, output: int) -> tuple[int, int] | None:
        """Lengths to use, or None when the request is left out."""
        prompt, output = self.scaled(prompt), self.scaled(output)
        room = None if self.max_context is None else self.max_context - self.reserve
        if room is not None and prompt + output > room:
            if self.policy == "skip" or output >= room:
                self.skipped += 1
                return None
            self.clipped += 1
            prompt = room - output
        self.kept += 1
        return prompt, output


@dataclass(slots=True)
class TrafficContext:
    """What a workload is given: how to write prompts, the seed, a salt for the words, and the context limit."""

    writer: PromptWriter
    seed: int = 0
    salt: str = ""
    fitting: Fitting = field(default_factory=lambda: Fitting(None))

    def shape(self, index: int) -> Random:
        """Random source for the lengths and times of session `index`: a function of the seed alone."""
        return Random(f"shape/{self.seed}/{index}")

    def words(self, *key: object) -> Random:
        """Random source for words: a function of seed, salt and key, so that equal keys give equal text."""
        return Random(f"words/{self.seed}/{self.salt}/{key}")


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """A registered workload: `options` is a frozen dataclass of defaults, `sessions` an endless or finite stream.

    `has_arrivals`: sessions come with times, which are taken unless others are asked for; `may_have_arrivals`: some do, and
    they are taken if asked for (`--arrivals trace`).
    """

    what: str
    options: type[Any]
    sessions: Callable[[Any, TrafficContext], Iterator[Session]]
    has_arrivals: bool = False
    may_have_arrivals: bool = False

    def gives_arrivals(self, asked: str | None) -> bool:
        """Whether sessions bring their times, when arrivals of kind `asked` are wanted."""
        return self.has_arrivals or (self.may_have_arrivals and asked == "trace")


@dataclass(frozen=True, slots=True)
class IntRange:
    """Inclusive range `low:high` of a length in tokens."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, field_name: str) -> IntRange:
        low, _, high = text.partition(":")
        try:
            parsed = cls(int(low), int(high or low))
        except ValueError:
            raise InvalidInput(f"expected N or LOW:HIGH, got {text!r}", field=field_name) from None
        if not 0 < parsed.low <= parsed.high:
            raise InvalidInput(f"expected 0 < LOW <= HIGH, got {text!r}", field=field_name)
        return parsed

    def draw(self, source: Random) -> int:
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}:{self.high}"


def single(index: int, make: Callable[[], Call], arrival_s: float | None = None) -> Session:
    """A session of one call, built only when it is sent."""

    def script() -> Script:
        yield Stage((make(),))

    return Session(index, 1, script, arrival_s)
