"""Requests that share a long prefix in groups, each with an end of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from headrace.base.errors import InvalidInput
from headrace.bench.traffic import Call, IntRange, Session, TrafficContext, WorkloadKind, single


@dataclass(frozen=True, slots=True)
class Options:
    """`prefix`: tokens shared within a group; `groups`: number of prefixes, taken in turn; `isl`: own tokens of each
    request; `osl`: answer tokens."""

    prefix: int = 512
    groups: int = 1
    isl: IntRange = IntRange(32, 32)
    osl: IntRange = IntRange(64, 64)


def sessions(options: Options, context: TrafficContext) -> Iterator[Session]:
    if options.groups < 1:
        raise InvalidInput("must be at least 1", field="--set groups")
    context.fitting.scale_to(options.prefix + options.isl.high + options.osl.high)
    index = 0
    for draw in count():
        source = context.shape(draw)
        own = options.isl.draw(source)
        lengths = context.fitting.fit(options.prefix + own, options.osl.draw(source))
        if lengths is None:
            if context.fitting.hopeless:
                return
            continue
        prefix = context.fitting.scaled(options.prefix)

        def make(i: int = index, prefix: int = prefix, lengths: tuple[int, int] = lengths) -> Call:
            return _call(context, i, i % options.groups, prefix, lengths, seen=i >= options.groups)

        yield single(index, make)
        index += 1


def _call(
    context: TrafficContext, index: int, group: int, prefix: int, lengths: tuple[int, int], *, seen: bool
) -> Call:
    writer = context.writer
    words = max(2, lengths[0] - writer.template_tokens)
    prefix = min(prefix, words - 1)
    head = writer.unique_text(context.words("prefix", group), prefix, group, context.salt)
    tail = writer.unique_text(context.words("own", index), words - prefix, index, context.salt + "own")
    return Call(f"{head} {tail}", lengths[0], lengths[1], prefix if seen else 0)


WORKLOAD = WorkloadKind("groups of requests with a common prefix", Options, sessions)
