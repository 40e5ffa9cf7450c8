"""Questions over long documents that many requests share, the popular ones more often (Zipf)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from headrace.base.errors import InvalidInput
from headrace.bench.traffic import Call, IntRange, Session, TrafficContext, WorkloadKind, single


@dataclass(frozen=True, slots=True)
class Options:
    """`documents` in the collection, `document` tokens each, `retrieved` of them in a prompt in order of rank, then a
    question of `isl` tokens; `osl` answer tokens; `skew`: Zipf exponent of their popularity (0: all alike)."""

    documents: int = 20
    document: int = 1024
    retrieved: int = 2
    isl: IntRange = IntRange(16, 64)
    osl: IntRange = IntRange(32, 128)
    skew: float = 1.0


def sessions(options: Options, context: TrafficContext) -> Iterator[Session]:
    if not 1 <= options.retrieved <= options.documents:
        raise InvalidInput(f"must be from 1 to {options.documents}", field="--set retrieved")
    context.fitting.scale_to(options.retrieved * options.document + options.isl.high + options.osl.high)
    weights = [1.0 / (rank + 1) ** options.skew for rank in range(options.documents)]
    seen: set[tuple[int, ...]] = set()
    index = 0
    for draw in count():
        source = context.shape(draw)
        own, output = options.isl.draw(source), options.osl.draw(source)
        chosen: list[int] = []
        while len(chosen) < options.retrieved:
            rank = source.choices(range(options.documents), weights)[0]
            if rank not in chosen:
                chosen.append(rank)
        documents = tuple(sorted(chosen))
        lengths = context.fitting.fit(options.retrieved * options.document + own, output)
        if lengths is None:
            if context.fitting.hopeless:
                return
            continue
        known = max((k for k in range(len(documents) + 1) if k == 0 or documents[:k] in seen), default=0)
        seen.update(documents[: k + 1] for k in range(len(documents)))
        size = context.fitting.scaled(options.document)

        def make(
            i: int = index,
            documents: tuple[int, ...] = documents,
            lengths: tuple[int, int] = lengths,
            size: int = size,
            shared: int = known * size,
        ) -> Call:
            writer = context.writer
            texts = [writer.unique_text(context.words("document", d), size, d, context.salt) for d in documents]
            question = max(1, lengths[0] - writer.template_tokens - size * len(documents))
            asked = writer.unique_text(context.words("question", i), question, i, context.salt + "question")
            return Call(" ".join((*texts, asked)), lengths[0], lengths[1], shared)

        yield single(index, make)
        index += 1


WORKLOAD = WorkloadKind("questions over long shared documents", Options, sessions)
