"""How many prompt tokens a step may carry beside running streams, whose next tokens wait for them.

Prompts alone are computed fastest in long chunks. Beside streams a chunk is a matter of fairness: on two cores a chunk of 512
tokens of a small model holds up every stream for as long as forty of their own steps, and cut into pieces it costs hardly more.
"""

from __future__ import annotations

import msgspec

LEAST_TOKENS_PER_STREAM = 16
"""Whatever a step takes then. Kernels multiply 16 rows about as fast as fewer. And chats bring about 6 prompt tokens for each
that they get, agents 15: with fewer than that beside each stream, requests would wait for their first token and not between
tokens, for as long in all."""
FIRST_TOKENS = 64
"""Until a step with a prompt has been measured."""
_KEPT = 0.8
"""Of what earlier steps say, with each new one: some five steps count."""


class PrefillLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on prompts beside streams; fields as in `SchedulerConfig`."""

    max_prefill_tokens: int | None = None
    prefill_burst: float | None = None
    step_target_s: float | None = None


# A time and not a number of tokens: it fits small models and large ones, few cores and many, short contexts and long ones.
# In simulations of a full server first tokens come a quarter later with 50 ms than without a limit, with 75 ms a tenth.
CPU_LIMITS = PrefillLimits(step_target_s=0.075)
# A short chunk hides the reading of the weights that the streams' step needs anyway, and delays their next token by a few
# milliseconds at most. It gives way when more than one request for every 64 streams is new: a burst is served best by
# long chunks.
GPU_LIMITS = PrefillLimits(max_prefill_tokens=256, prefill_burst=1 / 64)


class StepPace:
    """Cuts prompts so that a step takes about `target_s`, by what a token of recent steps with prompts has cost.

    Measured seconds are all it knows, so with the same results it says the same. One rate is enough although a step has
    a fixed part: a shorter step shows a higher rate, and what it says next is closer to the target each time.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._seconds = 0.0
        self._tokens = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of `tokens`, of prompts and of streams, took so long."""
        self._seconds = _KEPT * self._seconds + seconds
        self._tokens = _KEPT * self._tokens + tokens

    def prompt_tokens(self, streams: int) -> int | None:
        """Most prompt tokens of a step that also makes a token for each of `streams`; None: as many as there are."""
        if self._tokens == 0.0:
            fitting = FIRST_TOKENS
        elif self._seconds <= 0.0:
            return None
        else:
            fitting = int(self._target_s * self._tokens / self._seconds) - streams
        return max(fitting, LEAST_TOKENS_PER_STREAM * streams)
