"""Measured runs nearby: what the fit gets wrong on a campaign's own runs, carried over to other loads of that campaign.

Simple kriging: errors of two runs of one campaign (family, engine, card, version, weight format) are alike by
exp(-distance / `REACH`), where the distance is taken between the logarithms of what distinguishes the runs, and every
measurement has an error of its own, `NOISE` of the variance that is shared; more of it where its neighbours contradict it
(`fitting.kriging_weights`). Runs of other campaigns say nothing: carrying such errors across families made predictions worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from headrace.plan.deployment import Deployment
from headrace.spec.accounting import parameters
from headrace.spec.engine_facts import plain_version
from headrace.spec.model import ModelSpec

REACH = 3.0
"""Distance over which likeness falls to 1/e, in natural logarithms: three means a factor of 20 in one of the coordinates."""
NOISE = 0.1
"""Variance of a single measurement over the variance that neighbours share."""
LARGEST = 2.0
"""Errors count at most this much, in logarithms."""
CONTRADICTED = 0.7
"""A run that lies this far from what the others expect of it, in logarithms (a factor of two), counts with twice its noise."""
ROUNDS = 4
"""Passes over which noise and weights settle."""

TP = 3
"""Place of the tensor-parallel size in a position."""


class Run(msgspec.Struct, frozen=True):
    """A measured run: its position, and for each metric the weight with which it moves its neighbours (0: not measured)."""

    position: tuple[float, ...]
    ttft: float = 0.0
    tpot: float = 0.0
    throughput: float = 0.0


def campaign_name(family: str, d: Deployment) -> str:
    """The runs that may speak for each other: family, engine, card, version and weight format."""
    return f"{family}|{d.engine}|{d.gpu.id}|{plain_version(d.inputs.engine_version)}|{d.weights}"


def position(d: Deployment, requests: float, isl: float, osl: float) -> tuple[float, ...]:
    """Where a run lies among those of its campaign: logarithms of its load, its layout and the model's active parameters."""
    layout = d.layout
    active = _active_parameters(d.model.spec)
    return tuple(math.log(max(1.0, x)) for x in (requests, isl, osl, layout.tp, layout.dp, layout.ep, active))


@lru_cache(maxsize=128)
def _active_parameters(spec: ModelSpec) -> float:
    return float(parameters(spec).active)


def likeness(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of two runs' errors."""
    return math.exp(-math.dist(a, b) / REACH)


def shift(runs: Sequence[Run], at: Sequence[float], metric: str) -> float:
    """Expected error of the fit there, in logarithms, from these runs of the same campaign."""
    total = 0.0
    for run in runs:
        if weight := getattr(run, metric):
            total += weight * likeness(run.position, at)
    return total
