"""Users who chat: a common system prompt, turns with growing history, and time to think between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from headrace.base.errors import InvalidInput
from headrace.bench.traffic import Call, IntRange, Message, Script, Session, Stage, TrafficContext, WorkloadKind


@dataclass(frozen=True, slots=True)
class Options:
    """`turns` per session; `system`: tokens of the common system prompt; `isl`: tokens of a user's turn; `osl`: answer
    tokens; `think`: mean seconds between an answer and the next turn (exponential, at most five times the mean).
    `history`: `replies` puts the server's own answers into the history, as real chats do; `canned` puts random text of
    the same length there, so that two servers get the very same prompts.
    """

    turns: IntRange = IntRange(2, 5)
    system: int = 128
    isl: IntRange = IntRange(16, 96)
    osl: IntRange = IntRange(32, 128)
    think: float = 1.0
    history: str = "replies"


def sessions(options: Options, context: TrafficContext) -> Iterator[Session]:
    if options.history not in ("replies", "canned"):
        raise InvalidInput(f"expected replies or canned, got {options.history!r}", field="--set history")
    longest = options.system + options.turns.high * (options.isl.high + options.osl.high)
    context.fitting.scale_to(longest)
    index = 0
    for draw in count():
        source = context.shape(draw)
        turns = [
            (options.isl.draw(source), options.osl.draw(source), min(source.expovariate(1.0), 5.0) * options.think)
            for _ in range(options.turns.draw(source))
        ]
        whole = context.fitting.fit(
            options.system + sum(i + o for i, o, _ in turns) - turns[-1][1] + 8 * len(turns), turns[-1][1]
        )
        if whole is None:
            if context.fitting.hopeless:
                return
            continue
        yield _session(index, turns, options, context)
        index += 1


def _session(index: int, turns: list[tuple[int, int, float]], options: Options, context: TrafficContext) -> Session:
    scaled, writer = context.fitting.scaled, context.writer

    def script() -> Script:
        system = writer.text(context.words("system"), scaled(options.system))
        history = [Message("system", system)] if system else []
        known = scaled(options.system) if system else 0
        for turn, (own, output, think_s) in enumerate(turns):
            own, output = scaled(own), scaled(output)
            tag = index * 64 + turn
            history.append(Message("user", writer.unique_text(context.words("turn", tag), own, tag, context.salt)))
            shared = known if turn or index else 0
            prompt = known + own + writer.template_tokens + writer.message_tokens * (len(history) - 1)
            call = Call(tuple(history), prompt, output, shared)
            replies = yield Stage((call,), pause_s=think_s if turn else 0.0)
            reply = replies[0] if options.history == "replies" else writer.text(context.words("reply", tag), output)
            history.append(Message("assistant", reply or " "))
            known += own + output

    return Session(index, len(turns), script)


WORKLOAD = WorkloadKind("multi-turn users with growing history and think time", Options, sessions)
