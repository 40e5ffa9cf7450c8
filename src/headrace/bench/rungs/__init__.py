"""The steps of the optimization ladder, one file each, in order of `place`. A rung that the engine lacks is listed as absent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.base.registry import Registry

RUNGS = Registry("headrace.bench.rungs", "RUNG", kind="rung")


@dataclass(frozen=True, slots=True)
class Rung:
    """One change to how a model is served.

    `engine`: the target that is started. `variants`: settings that make the change, the first that the engine accepts
    is taken. `technique`: whether it can be put on the engine alone and on top of the others; the baselines cannot.
    `share`: part of the requests that is sent, below 1 only where the rung is too slow for all of them (then said).
    """

    place: int
    label: str
    what: str
    engine: str
    variants: tuple[Mapping[str, str], ...]
    technique: bool = True
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """What the ladder starts: a rung, alone or on top of the techniques before it. `candidates`: settings to try in turn."""

    id: str
    label: str
    stack: str
    rung: Rung
    candidates: tuple[Mapping[str, str], ...]


def all_rungs() -> list[Rung]:
    """Registered rungs in order of their place."""
    return sorted((rung for _, rung in RUNGS), key=lambda rung: rung.place)


def baseline_settings(rungs: list[Rung]) -> dict[str, str]:
    """Settings of the plain engine, which every technique changes in exactly one place."""
    return dict(next(r for r in rungs if r.engine == "headrace" and not r.technique).variants[0])


def steps(rungs: list[Rung]) -> list[Step]:
    """Baselines, each technique alone, and each on top of those before it (the first of them is both at once).

    The settings of what a step builds on are its first variant; the ladder replaces them by what the engine accepted.
    """
    plain = baseline_settings(rungs)
    found: list[Step] = []
    below: dict[str, str] = dict(plain)
    names: list[str] = []
    for rung in rungs:
        if not rung.technique:
            found.append(Step(_id(rung.label), rung.label, "baseline", rung, rung.variants))
            continue
        alone = tuple({**plain, **variant} for variant in rung.variants)
        found.append(Step(f"alone-{_id(rung.label)}", f"engine + {rung.label}", "alone", rung, alone))
        if names:
            label = f"stack up to {rung.label}"
            stacked = tuple({**below, **variant} for variant in rung.variants)
            found.append(Step(f"stacked-{_id(rung.label)}", label, "stacked", rung, stacked))
        below |= rung.variants[0]
        names.append(rung.label)
    return found


def _id(label: str) -> str:
    return label.lower().replace(" ", "-")
