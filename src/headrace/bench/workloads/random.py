"""Independent requests of random lengths; no two prompts share a prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from headrace.bench.traffic import Call, IntRange, Session, TrafficContext, WorkloadKind, single


@dataclass(frozen=True, slots=True)
class Options:
    """`isl`, `osl`: prompt and answer tokens, uniform over the range."""

    isl: IntRange = IntRange(64, 256)
    osl: IntRange = IntRange(64, 128)


def unique_call(context: TrafficContext, index: int, prompt: int, output: int) -> Call:
    """A request of `prompt` tokens, template included, that begins like no other of the run."""
    writer = context.writer
    words = max(1, prompt - writer.template_tokens)
    text = writer.unique_text(context.words("request", index), words, index, context.salt)
    return Call(text, prompt, output)


def sessions(options: Options, context: TrafficContext) -> Iterator[Session]:
    context.fitting.scale_to(options.isl.high + options.osl.high)
    index = 0
    for draw in count():
        source = context.shape(draw)
        lengths = context.fitting.fit(options.isl.draw(source), options.osl.draw(source))
        if lengths is None:
            if context.fitting.hopeless:
                return
            continue

        def make(i: int = index, lengths: tuple[int, int] = lengths) -> Call:
            return unique_call(context, i, *lengths)

        yield single(index, make)
        index += 1


WORKLOAD = WorkloadKind("independent requests of random lengths", Options, sessions)
