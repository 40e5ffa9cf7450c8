"""Dollars: per million tokens, per query, per conversation, and the size of a fleet."""

from __future__ import annotations

import math

import msgspec

from headrace.base.errors import InvalidInput
from headrace.spec.prediction import Figure, weakest


def dollars_per_million(usd_per_hour: float, tokens_per_s: float) -> float:
    """$/M tokens = ($/h / tok/s) x 10^6 / 3600, that is x 277.8."""
    if not tokens_per_s > 0:
        raise InvalidInput(f"tokens per second must be above 0, got {tokens_per_s}", field="tokens_per_s")
    return usd_per_hour / tokens_per_s * 1e6 / 3600


def usd_per_million(price: Figure, tokens_per_s: Figure) -> Figure:
    """The same with intervals: cheap and fast at the low end, expensive and slow at the high end."""
    return Figure(
        dollars_per_million(price.value, tokens_per_s.value),
        dollars_per_million(price.low, tokens_per_s.high),
        dollars_per_million(price.high, tokens_per_s.low),
        weakest(price.grade, tokens_per_s.grade),
    )


class QueryCost(msgspec.Struct, frozen=True):
    """Dollars of one query (a prompt and its answer) and of a conversation of `turns` of them.

    Without a prefix cache each turn pays for the whole history again; with one only for its own new tokens.
    """

    usd_per_query: float
    usd_per_conversation: float
    usd_per_conversation_with_prefix_cache: float
    turns: int


def query_cost(usd_in_per_million: float, usd_out_per_million: float, isl: int, osl: int, turns: int = 5) -> QueryCost:
    """Costs from the prices of prompt and answer tokens; a turn's history is all earlier prompts and answers."""
    query = (isl * usd_in_per_million + osl * usd_out_per_million) / 1e6
    history = sum(turn * (isl + osl) for turn in range(turns))
    return QueryCost(
        usd_per_query=query,
        usd_per_conversation=turns * query + history * usd_in_per_million / 1e6,
        usd_per_conversation_with_prefix_cache=turns * query,
        turns=turns,
    )


class Fleet(msgspec.Struct, frozen=True):
    """Instances for a request rate, one spare (N + 1) included. `utilisation` of the instances without the spare."""

    instances: int
    gpus: int
    usd_per_hour: float | None
    usd_per_month: float | None
    utilisation: float


def fleet(
    request_rate_rps: float,
    osl: int,
    tokens_per_s_per_instance: float,
    gpus_per_instance: int,
    usd_per_gpu_hour: float | None,
    headroom: float = 0.8,
) -> Fleet:
    """How many instances serve `request_rate_rps` requests per second at `headroom` of their capacity, plus one spare."""
    if not request_rate_rps > 0:
        raise InvalidInput(f"request rate must be above 0, got {request_rate_rps}", field="rate")
    per_instance = tokens_per_s_per_instance / osl
    needed = max(1, math.ceil(request_rate_rps / (per_instance * headroom)))
    gpus = (needed + 1) * gpus_per_instance
    hourly = None if usd_per_gpu_hour is None else gpus * usd_per_gpu_hour
    return Fleet(
        needed + 1, gpus, hourly, None if hourly is None else hourly * 730, request_rate_rps / (per_instance * needed)
    )
