"""How public benchmark campaigns launch what they measure: one TOML file per campaign under `spec/campaigns`.

A published row names model, card, engine, version and load; the rest of the command line stands in the campaign's own
scripts. What is not stated there is left at the engine's default.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

import msgspec

from headrace.spec.engine_facts import version_key


class Launch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the runs that these conditions meet; an empty condition is met by all.

    `models`: catalog ids; `weights`: how the format's name begins; `since`: first version of the engine, one that is no number
    counts as the newest; `tp_below`, `concurrency_from`: bounds. Settings: see `plan.deployment.Inputs`. `source`: files and commits.
    """

    source: str
    models: tuple[str, ...] = ()
    engine: str = ""
    gpu: str = ""
    generation: str = ""
    weights: str = ""
    since: str = ""
    isl: int = 0
    osl: int = 0
    tp_below: int = 0
    concurrency_from: int = 0
    mixed_chunk: bool = False
    batch_wait_steps: int = 0
    batch_wait_share: float = 0.0
    poll_steps: int = 1

    def settings(self) -> dict[str, object]:
        """What is set other than by default, by name."""
        found = {name: getattr(self, name) for name in SETTINGS}
        return {name: value for name, value in found.items() if value != _DEFAULTS[name]}


SETTINGS = ("mixed_chunk", "batch_wait_steps", "batch_wait_share", "poll_steps")
_DEFAULTS = {name: getattr(Launch(source=""), name) for name in SETTINGS}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What a row says about a run, in the catalog's names."""

    model: str
    engine: str
    version: str
    gpu: str
    generation: str
    weights: str
    tp: int
    isl: int | None
    osl: int | None
    concurrency: int | None


class Campaign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One campaign. `lengths`: those of its prompts and answers, empty for any; `shortest`: it draws them from this share
    on, 1 where all are equal; `per_server`: a concurrency is that of one instance."""

    name: str
    lengths: tuple[int, ...] = ()
    shortest: float = 1.0
    per_server: bool = False
    models: tuple[str, ...] = ()
    launch: tuple[Launch, ...] = ()

    def holds(self, run: Run) -> bool:
        """Whether such a run may be one of this campaign's."""
        of_lengths = not self.lengths or {run.isl, run.osl} <= set(self.lengths)
        return of_lengths and (not self.models or run.model in self.models)

    def settings(self, run: Run) -> dict[str, object]:
        """The settings of a run: those of each launch whose conditions it meets, later ones over earlier ones."""
        found: dict[str, object] = {}
        for launch in self.launch:
            if _meets(run, launch):
                found |= launch.settings()
        return found


def _meets(run: Run, launch: Launch) -> bool:
    version = version_key(run.version)
    return (
        (not launch.models or run.model in launch.models)
        and launch.engine in ("", run.engine)
        and launch.gpu in ("", run.gpu)
        and launch.generation in ("", run.generation)
        and run.weights.startswith(launch.weights)
        and (not launch.since or not version or version >= version_key(launch.since))
        and launch.isl in (0, run.isl)
        and launch.osl in (0, run.osl)
        and (not launch.tp_below or run.tp < launch.tp_below)
        and (run.concurrency or 0) >= launch.concurrency_from
    )


@cache
def campaigns() -> tuple[Campaign, ...]:
    """All campaigns, those that name their lengths first."""
    files = resources.files("headrace.spec").joinpath("campaigns").iterdir()
    found = [msgspec.convert(tomllib.loads(f.read_text()), Campaign) for f in files if f.name.endswith(".toml")]
    return tuple(sorted(found, key=lambda c: (not c.lengths, c.name)))


def campaign_of(run: Run) -> Campaign:
    """The campaign that such a run is taken for: the last one holds all runs."""
    return next(c for c in campaigns() if c.holds(run))
