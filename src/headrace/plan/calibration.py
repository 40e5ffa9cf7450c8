"""The shipped calibration: fitted efficiencies, offsets of measuring campaigns, and conformal intervals."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from pathlib import Path

import msgspec

from headrace.base.files import write_atomic
from headrace.plan.deployment import Deployment
from headrace.plan.neighbours import Run
from headrace.spec.engine_facts import plain_version

METRICS = ("ttft", "tpot", "throughput")
EFFECTS = (*METRICS, "wave")

FILE = "calibration.json"

ANY = "any"
"""Stands where a family would in groups that hold all families."""


class Effects(msgspec.Struct, frozen=True):
    """Offsets of one group of measurements, in logarithms; `wave` scales how many other prompts a request waits for."""

    ttft: float = 0.0
    tpot: float = 0.0
    throughput: float = 0.0
    wave: float = 0.0


class Calibration(msgspec.Struct, frozen=True):
    """One fit: parameters of the roofline by name, offsets by group, and the measured runs of each campaign."""

    parameters: dict[str, float]
    effects: dict[str, Effects]
    runs: dict[str, list[Run]] = {}

    def effect(self, groups: tuple[str, ...]) -> Effects:
        """Sum of the offsets of these groups; zero for groups never measured."""
        found = [self.effects[g] for g in groups if g in self.effects]
        return Effects(**{name: sum(getattr(e, name) for e in found) for name in EFFECTS})


class Band(msgspec.Struct, frozen=True):
    """For one metric: the factor on the prediction that minimises the mean relative error, and the 90 % range of observed /
    predicted, from `n` cross-validated points, of which `mape` and `median` are the relative errors after the shift."""

    shift: float
    low: float
    high: float
    n: int
    mape: float = 0.0
    median: float = 0.0


class Tier(msgspec.Struct, frozen=True):
    """Bands of all metrics."""

    ttft: Band
    tpot: Band
    throughput: Band


class Fold(msgspec.Struct, frozen=True):
    """The model that saw nothing of one family, with intervals calibrated on the other families."""

    calibration: Calibration
    tier: Tier


class CalibrationSet(msgspec.Struct, frozen=True):
    """Everything a fit leaves behind.

    `rows`: hashes (`key_of`) of every point used, with its family. Such a point is scored with the fold that left its
    family out, so that no score is ever taken on a row that the model saw. `families`: family|engine pairs that were measured.
    Intervals: `near` for a load of a measured cell (a campaign at one tensor-parallel size), `seen` for another cell of a
    measured family, engine and card, `unseen` for anything else.
    """

    main: Calibration
    near: Tier
    seen: Tier
    unseen: Tier
    folds: dict[str, Fold]
    rows: dict[str, str]
    families: list[str]


def group_names(family: str, d: Deployment) -> tuple[str, ...]:
    """The groups a run belongs to: a campaign (family, engine, card, version) at one tensor-parallel size, the campaign,
    the same on any version, the family on the engine, the engine's build, the card.

    The last two have no family in them: what one family's runs say about another one's on the same build or card.
    """
    version = plain_version(d.inputs.engine_version)
    campaign = f"{family}|{d.engine}|{d.gpu.id}|{version}"
    # On a CPU the same engine is another program: what it deviates by on GPUs says nothing there.
    build = f"{d.engine}|{version}" if d.gpu.generation != "cpu" else f"{d.engine} on CPUs|{version}"
    return (
        campaign,
        f"{campaign}|tp{d.layout.tp}",
        f"{family}|{d.engine}|{d.gpu.id}",
        f"{family}|{d.engine}",
        f"{ANY}|{build}",
        f"{ANY}|{d.gpu.id}",
    )


def key_of(d: Deployment) -> str:
    """A stable hash of the run that a question is about: what is served on what, cut how, under which load.

    It is made from resolved names, so that a run is recognised under another spelling and with a memory setting that its row
    leaves out. A question of one's own (`concurrency_scope` "instance") is no published run.
    """
    i = d.inputs
    version = plain_version(i.engine_version)
    layout = (i.n_gpus, d.layout.tp, d.layout.pp, d.layout.dp, d.layout.ep)
    load = (i.isl, i.osl, i.concurrency, i.concurrency_scope, i.draft_tokens)
    run = (d.model.id, d.gpu.id, d.engine, version, *layout, d.weights, *load)
    return hashlib.sha256(msgspec.json.encode(run)).hexdigest()[:16]


@cache
def shipped() -> CalibrationSet:
    """The calibration in the package."""
    text = resources.files("headrace.plan").joinpath(FILE).read_bytes()
    return msgspec.json.decode(text, type=CalibrationSet)


def write(calibration: CalibrationSet, path: Path) -> None:
    """Store a calibration."""
    write_atomic(path, msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n")
