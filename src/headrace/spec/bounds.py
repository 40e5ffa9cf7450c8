"""Closed-form bounds of serving: what memory, bandwidth and price allow before anything is simulated or measured.

Bytes are bytes, times are seconds, prices are dollars per hour. Every function states its formula.
"""

from __future__ import annotations

from headrace.base.errors import InvalidInput


def users_by_memory(memory_bytes: float, weight_bytes: float, overhead_bytes: float, kv_bytes_per_user: float) -> int:
    """(memory - weights - overhead) / KV per user, rounded down; 0 where the weights alone do not fit."""
    if kv_bytes_per_user <= 0:
        raise InvalidInput(f"KV bytes per user must be positive, got {kv_bytes_per_user}", field="kv_bytes_per_user")
    return max(0, int((memory_bytes - weight_bytes - overhead_bytes) // kv_bytes_per_user))


def itl_floor_s(weights_read_bytes: float, kv_read_bytes: float, bandwidth_bytes_per_s: float) -> float:
    """(weights read + KV read by all requests) / bandwidth: no step of the batch can be faster."""
    return (weights_read_bytes + kv_read_bytes) / bandwidth_bytes_per_s


def batch_one_ceiling_tokens_per_s(weights_read_bytes: float, bandwidth_bytes_per_s: float) -> float:
    """bandwidth / weights: the most one stream can decode, at an empty context."""
    return bandwidth_bytes_per_s / weights_read_bytes


def throughput_tokens_per_s(batch: int, itl_s: float) -> float:
    """batch / ITL."""
    return batch / itl_s


def usd_per_million_tokens(usd_per_hour: float, tokens_per_s: float) -> float:
    """(dollars per hour / tokens per second) x 10^6 / 3,600 (= 277.8)."""
    if tokens_per_s <= 0:
        raise InvalidInput(f"tokens per second must be positive, got {tokens_per_s}", field="tokens_per_s")
    return usd_per_hour / tokens_per_s * 1e6 / 3600


def speculation_tokens(acceptance: float, drafts: int) -> float:
    """Expected tokens per step with `drafts` proposed tokens: (1 - a^(g+1)) / (1 - a), Leviathan et al. 2023, eq. 1."""
    if not 0 <= acceptance <= 1 or drafts < 0:
        raise InvalidInput(f"acceptance {acceptance} or drafts {drafts} is out of range", field="acceptance")
    return drafts + 1.0 if acceptance == 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def speculation_speedup(acceptance: float, drafts: int, draft_cost: float) -> float:
    """Expected tokens / (1 + g c), `draft_cost` c being one draft token's time over one step of the model."""
    return speculation_tokens(acceptance, drafts) / (1 + drafts * draft_cost)
