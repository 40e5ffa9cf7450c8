"""The scheduler's settings, checked once and frozen."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of one scheduler; a wrong value raises `InvalidInput` naming the field.

    `max_num_seqs`: sequences running at once (slots of the executor). `max_batched_tokens`: tokens computed per step.
    `max_model_len`: prompt and generated tokens of one sequence. `max_prefill_tokens`: most prompt tokens per step
    while others decode, which bounds their inter-token latency; None leaves it to the step's budget.
    `prefill_burst`: that limit is lifted while the requests that are prefilling or waiting are more than this share of those
    that decode: few streams then wait for many, and long chunks serve the many best. None: never lifted.
    `step_target_s`: prompts are cut so that a step in which others decode takes about that long by what steps have taken
    lately (`control.prefill`); with both limits the lower one holds. None: time is no limit.
    `chunked_prefill` False: a request starts only in a step that computes all that it lacks.
    `order`, `eviction`, `admission`: names under `control/policies`. `watermark`: share of the pool that admission
    keeps free for the growth of running sequences. `share_min`: a waiting request is held back for a running one that
    computes its prefix if that spares it this share of its own prompt's missing tokens, and at least a block.
    """

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int
    max_prefill_tokens: int | None = None
    prefill_burst: float | None = None
    step_target_s: float | None = None
    prefix_caching: bool = True
    chunked_prefill: bool = True
    order: str = "priority"
    eviction: str = "lru"
    admission: str = "reserve"
    watermark: float = 0.01
    share_min: float = 0.05

    def __post_init__(self) -> None:
        for field in ("max_num_seqs", "max_batched_tokens", "max_prefill_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InvalidInput(f"must be at least 1, not {value}", field=field)
        if self.max_model_len < 2:
            raise InvalidInput(
                f"must be at least 2 (one prompt token, one generated), not {self.max_model_len}", field="max_model_len"
            )
        if self.max_batched_tokens < self.max_num_seqs:
            raise InvalidInput(
                f"{self.max_batched_tokens} tokens per step cannot serve {self.max_num_seqs} sequences at one each",
                field="max_batched_tokens",
                remedy=f"raise it to {self.max_num_seqs} or more, or lower max_num_seqs",
            )
        if (
            not self.chunked_prefill
            and min(self.max_batched_tokens, self.max_prefill_tokens or 2**63) < self.max_model_len
        ):
            raise InvalidInput(
                f"without it a step must hold a whole sequence of {self.max_model_len} tokens, not {self.max_batched_tokens}",
                field="chunked_prefill",
                remedy=f"raise max_batched_tokens to {self.max_model_len}, or lower max_model_len",
            )
        if self.step_target_s is not None:
            if not self.step_target_s > 0.0:
                raise InvalidInput(f"must be above 0 s, not {self.step_target_s}", field="step_target_s")
            if not self.chunked_prefill:
                raise InvalidInput(
                    "without chunks a step is as long as its longest prompt takes",
                    field="step_target_s",
                    remedy="leave out step_target_s or allow chunked_prefill",
                )
        for field in ("watermark", "share_min"):
            value = getattr(self, field)
            if not 0.0 <= value < 1.0:
                raise InvalidInput(f"must lie in [0, 1), not {value}", field=field)
