"""The scheduler's state of one request."""

from __future__ import annotations

from enum import Enum, auto

from headrace.control.api import Finish, FinishReason, Timeline
from headrace.control.node import Node, encode
from headrace.control.request import Request
from headrace.control.step import TokenLogprobs
from headrace.control.timeline import Part, Stopwatch, seconds

Rank = tuple[int, int]
"""Place among requests, lowest first; unique, since its last part is the order of submission."""


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Known tokens, computed tokens, and the blocks that hold them.

    `token_ids`: the committed ones. `pending` more have been asked for in steps that are still in flight; their values
    are unknown here. `scheduled` positions are computed once the steps in flight are done, `computed` for certain.
    `incarnation` counts admissions, so that steps from before a preemption can be told apart.
    """

    __slots__ = (
        "_encoded", "behind", "bypassed", "cached_tokens", "computed", "decode_steps", "dirty", "held_for", "holds", "incarnation",
        "limit", "number", "pending", "place", "planned", "preemptions", "prefill_steps", "probed", "prompt_length",
        "prompt_logprobs", "rank", "request", "room", "scheduled", "slot", "state", "stopping_ids", "tables",
        "token_ids", "wants_prompt_logprobs", "watch",
    )  # fmt: skip

    def __init__(self, request: Request, number: int, limit: int, num_groups: int, start: int) -> None:
        """`limit`: tokens (prompt included) at which it ends. `start`: ticks. OverflowError for an id out of range."""
        self.request = request
        self.number = number
        self.rank: Rank = (0, number)
        self.limit = limit
        self.stopping_ids = request.sampling.stopping_ids
        self.token_ids = list(request.prompt_token_ids)
        self.prompt_length = len(self.token_ids)
        self._encoded = encode(self.token_ids)
        self.state = State.WAITING

        self.slot = -1
        self.scheduled = 0
        self.computed = 0
        self.pending = 0
        self.incarnation = 0
        self.planned = -1
        """The last step that computes a part of it."""

        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.room = 0
        """Tokens that the tables have blocks for."""
        self.behind = [0] * num_groups
        """Per group: how many leading blocks lie behind the sliding window and were given back."""
        self.dirty: list[tuple[int, int]] = []
        """(group, logical block) pairs whose id changed and that the executor has not been told of."""
        self.place: Node | None = None

        self.held_for: tuple[Sequence, int, int] | None = None
        """(producer, its incarnation, tokens it must have computed) while this one waits for a prefix in the making."""
        self.holds = 0
        self.bypassed = 0
        self.probed = (-1, 0)
        """(publications of the prefix cache, tokens it had of this request) when an order policy last asked."""

        self.wants_prompt_logprobs = request.sampling.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs] = []

        self.watch = Stopwatch(start)
        self.cached_tokens = -1
        self.prefill_steps = 0
        self.decode_steps = 0
        self.preemptions = 0

    @property
    def encoded(self) -> bytes:
        """All committed tokens, as the prefix tree wants them."""
        missing = len(self.token_ids) - len(self._encoded) // 4
        if missing:
            self._encoded += encode(self.token_ids[-missing:])
        return self._encoded

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_length

    def finish(self, reason: FinishReason, now: int, *, stop_token_id: int | None, error: str | None) -> Finish:
        """The terminal record, at `now` ticks."""
        self.watch.enter(self.watch.part, now)
        spent = self.watch.spent
        hit = max(0, self.cached_tokens)
        return Finish(
            reason=reason,
            prompt_tokens=self.prompt_length,
            completion_tokens=self.generated,
            cached_tokens=hit,
            stop_token_id=stop_token_id,
            error=error,
            timeline=Timeline(
                queue_s=seconds(spent[Part.QUEUE]),
                prefill_s=seconds(spent[Part.PREFILL]),
                decode_s=seconds(spent[Part.DECODE]),
                preempted_s=seconds(spent[Part.PREEMPTED]),
                total_s=seconds(sum(spent)),
                prefix_hit_tokens=hit,
                prefix_miss_tokens=self.prompt_length - hit,
                prefill_steps=self.prefill_steps,
                decode_steps=self.decode_steps,
                preemptions=self.preemptions,
            ),
        )
