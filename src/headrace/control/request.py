"""What a client sends to the engine: sampling rules and a request."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one sequence is sampled. Values are validated before they get here (`serve.protocol`, `headrace.llm`).

    Stop strings and `n` are not here: they belong to the layers that own text (stop strings) and requests (n).
    `max_tokens` is already clamped to what the context leaves. `temperature` 0 is greedy. `top_k` 0 is off.
    `seed` fixes the sequence's random stream, which depends only on (seed, index of the generated token), never on
    batch mates; None lets the front-end's random choice be filled in before submission, so the engine always has one.
    `logprobs`: alternatives reported beside the chosen token (0: only the chosen one; None: nothing). They are those of
    the raw model, before temperature, penalties, bias and filters. `prompt_logprobs`: the same for prompt tokens; such a
    request skips prefix-cache hits, since it needs every prompt position computed.
    `grammar`: a string made by `headrace.text.grammar` that the output must follow; the executor masks with a
    `GrammarMatcher`, which also applies `min_tokens` (EOS is held back only while the grammar allows another token).
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None

    @property
    def stopping_ids(self) -> frozenset[int]:
        """Tokens that end the sequence: stop ids always, EOS ids unless ignored."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(self.eos_token_ids))


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """One sequence to generate.

    `priority`: lower runs earlier. `namespace` isolates the prefix cache (model, adapter, tenant salt).
    `arrival_s`: CLOCK_MONOTONIC when the front-end accepted it (comparable across processes of one host).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    priority: int = 0
    namespace: str = ""
    arrival_s: float = 0.0
