"""The hardware catalog: one TOML file per GPU under `spec/gpus`, plus calibrated entries in the user's data folder.

Every figure carries its source, its date and, where the sources disagree or hedge, a range. Nothing is rounded to the
marketing size: memory is what the driver shows to a process, peaks are dense.
"""

from __future__ import annotations

import datetime
import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from headrace.base.errors import InvalidInput
from headrace.base.files import data_dir
from headrace.base.units import GB, GIB, MIB
from headrace.spec.prediction import GRADES, Figure, Grade

FIGURES = (
    "memory_gib",
    "bandwidth_gbs",
    "bf16_tflops",
    "fp16_tflops",
    "fp8_tflops",
    "fp4_tflops",
    "int8_tops",
    "tdp_w",
    "link_gbs",
    "measured_read_gbs",
    "measured_copy_gbs",
    "measured_bf16_tflops",
    "price_usd_h",
)
"""Names of the figures an entry may hold; the first two and `link_gbs` are required (a CPU has no link)."""

PRICE_STALE_DAYS = 90
"""Cloud prices move by tens of percent within a quarter; an older one is used, with a warning."""

Link = Literal["pcie", "nvlink", "xgmi", "none"]


@dataclass(frozen=True, slots=True)
class Sourced:
    """One catalogued figure. `value` None means there is none, and `absent` says why."""

    value: float | None
    low: float | None = None
    high: float | None = None
    grade: Grade = "datasheet"
    source: str = ""
    date: str = ""
    note: str = ""
    absent: str = ""

    def figure(self) -> Figure:
        """As a figure; ValueError when there is none."""
        if self.value is None:
            raise ValueError(self.absent)
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        return Figure(self.value, low, high, self.grade)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator (or a calibrated CPU). `generation` groups cards that share fitted efficiencies."""

    id: str
    name: str
    generation: str
    arch: str
    capability: str
    link: Link
    link_name: str
    max_linked_gpus: int
    memory_gb_marketing: float
    figures: Mapping[str, Sourced]
    aliases: tuple[str, ...] = ()
    notes: str = ""
    origin: str = field(default="", compare=False)

    def has(self, name: str) -> bool:
        """Whether the catalog knows a value for this figure."""
        return name in self.figures and self.figures[name].value is not None

    def figure(self, name: str) -> Figure:
        """A figure by name; `InvalidInput` with the reason when this card has none."""
        entry = self.figures.get(name)
        if entry is None or entry.value is None:
            why = entry.absent if entry is not None and entry.absent else "not in the catalog"
            raise InvalidInput(f"{self.name} has no {name}: {why}", field="gpu")
        return entry.figure()

    @property
    def memory_bytes(self) -> int:
        """Usable device memory in bytes."""
        return round(self.figure("memory_gib").value * GIB)

    @property
    def bandwidth(self) -> float:
        """Datasheet memory bandwidth in bytes per second."""
        return self.figure("bandwidth_gbs").value * 1e9

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second to the other GPUs of the scale-up domain, one direction; 0 without a link."""
        return self.figure("link_gbs").value * 1e9 if self.has("link_gbs") else 0.0

    def peak_flops(self, precision: str) -> float | None:
        """Dense peak in FLOP/s for a compute precision (bf16, fp16, fp8, fp4, int8); None if the card has no such unit."""
        name = {"int8": "int8_tops"}.get(precision, f"{precision}_tflops")
        if precision == "fp16" and not self.has(name):
            name = "bf16_tflops"
        return self.figures[name].value * 1e12 if self.has(name) else None  # type: ignore[operator]

    def price(self, override_usd_h: float | None = None) -> Figure | None:
        """Dollars per GPU-hour, or None when nobody publishes one."""
        if override_usd_h is not None:
            if not 0 < override_usd_h < math.inf:
                raise InvalidInput(f"price must be a number above 0, got {override_usd_h}", field="price")
            return Figure(override_usd_h, override_usd_h, override_usd_h, "exact")
        return self.figure("price_usd_h") if self.has("price_usd_h") else None

    def price_warning(self, today: datetime.date | None = None) -> str | None:
        """A sentence when the price is missing or older than `PRICE_STALE_DAYS` days; None when it is fresh."""
        entry = self.figures.get("price_usd_h")
        if entry is None or entry.value is None:
            return f"no price is known for {self.name}; give one with --price, or rank it on everything but dollars"
        year, month = (int(part) for part in entry.date.split("-")[:2])
        age = ((today or datetime.date.today()) - datetime.date(year, month, 1)).days
        if age <= PRICE_STALE_DAYS:
            return None
        return f"price of {self.name} dates from {entry.date} ({age} days ago); check it and override with --price"


def parse(text: str, origin: str) -> Gpu:
    """One catalog entry from TOML; `InvalidInput` names the file and key at fault."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{origin} is not valid TOML: {error}", field="gpu") from error
    try:
        figures = {name: _sourced(raw[name], f"{origin}: {name}") for name in FIGURES if name in raw}
        unknown = [k for k, v in raw.items() if isinstance(v, dict) and k not in FIGURES]
        if unknown:
            raise InvalidInput(f"{origin}: unknown figure {unknown[0]!r}", field=unknown[0])
        if raw["link"] not in get_args(Link):
            raise InvalidInput(f"{origin}: link must be one of {', '.join(get_args(Link))}", field="link")
        for required in ("memory_gib", "bandwidth_gbs"):
            if figures[required].value is None:
                raise InvalidInput(f"{origin}: {required} must have a value", field=required)
        return Gpu(
            id=raw["id"],
            name=raw["name"],
            generation=raw["generation"],
            arch=raw["arch"],
            capability=str(raw["capability"]),
            link=raw["link"],
            link_name=raw["link_name"],
            max_linked_gpus=int(raw["max_linked_gpus"]),
            memory_gb_marketing=float(raw["memory_gb_marketing"]),
            figures=figures,
            aliases=tuple(raw.get("aliases", ())),
            notes=raw.get("notes", ""),
            origin=origin,
        )
    except KeyError as error:
        raise InvalidInput(f"{origin}: {error.args[0]} is missing", field=str(error.args[0])) from error


def _sourced(raw: Mapping[str, Any], where: str) -> Sourced:
    for key in ("source", "date"):
        if not raw.get(key):
            raise InvalidInput(f"{where} has no {key}: every figure needs one", field=key)
    if "absent" in raw:
        return Sourced(None, source=raw["source"], date=raw["date"], absent=raw["absent"], note=raw.get("note", ""))
    value, grade = float(raw["value"]), raw.get("grade", "datasheet")
    low, high = float(raw.get("low", value)), float(raw.get("high", value))
    if grade not in GRADES:
        raise InvalidInput(f"{where}: grade must be one of {', '.join(GRADES)}", field="grade")
    if not 0 < low <= value <= high:
        raise InvalidInput(f"{where}: need 0 < low <= value <= high, got {low}, {value}, {high}", field="value")
    return Sourced(value, low, high, grade, raw["source"], raw["date"], raw.get("note", ""))


@cache
def _shipped() -> dict[str, Gpu]:
    folder = resources.files("headrace.spec").joinpath("gpus")
    entries = [parse(f.read_text(), f.name) for f in folder.iterdir() if f.name.endswith(".toml")]
    return {gpu.id: gpu for gpu in sorted(entries, key=lambda g: g.id)}


def calibrated_dir() -> Path:
    """Where `headrace calibrate` writes its entries."""
    return data_dir() / "gpus"


def catalog() -> dict[str, Gpu]:
    """Every known accelerator by id: the shipped ones, then the user's calibrated ones (which win)."""
    known = dict(_shipped())
    folder = calibrated_dir()
    if folder.is_dir():
        for path in sorted(folder.glob("*.toml")):
            gpu = parse(path.read_text(), str(path))
            known[gpu.id] = gpu
    return known


_SAYS_NOTHING = re.compile(
    r"^\d+ *x *(?=[a-z])|(?<=\d) *x *\d{1,2}$|(?<=gb) +x *\d{1,2}$|"
    r"\b(?:nvidia|amd|instinct|geforce|oam|hbm\d?e?)\b|(?<=sxm)\d\b|(?<=\d) *gb\b"
)
"""What drivers and people write around a card's name: a count, the maker, the kind of memory, the socket's version, the unit."""


def _fold(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _SAYS_NOTHING.sub("", name.lower()))


def spellings(gpu: Gpu) -> Iterator[str]:
    """Every spelling under which an entry is found."""
    yield gpu.id
    yield gpu.name
    yield from gpu.aliases


def find(name: str) -> Gpu:
    """The catalog entry called `name`: an id or an alias, in any case and punctuation, as drivers write it or not.

    A size in parentheses overrides the usable memory: `H100-80GB (79.18 GiB)`; so does a trailing `46068 MiB`. Engines
    log binary sizes as "GB", so GB there is read as whichever unit lies closer to the catalog.
    An unknown name is an `InvalidInput` that suggests the closest ones.
    """
    bare, stated = _stated_memory(name)
    known = catalog()
    index = {_fold(spelling): gpu for gpu in known.values() for spelling in spellings(gpu)}
    gpu = index.get(_fold(bare))
    if gpu is None:
        near = difflib.get_close_matches(_fold(bare), index, n=3, cutoff=0.5)
        hint = ", ".join(dict.fromkeys(index[n].id for n in near))
        remedy = (
            f"did you mean: {hint}"
            if near
            else ("`headrace plan gpus` lists those that are known, `headrace calibrate` adds this machine")
        )
        raise InvalidInput(f"unknown GPU {name!r}", field="gpu", remedy=remedy)
    if not stated:
        return gpu
    stated_bytes = min(stated, key=lambda count: abs(count - gpu.memory_bytes))
    memory = Sourced(stated_bytes / GIB, grade="measured", source="stated by the caller", date="now")
    return replace(gpu, figures={**gpu.figures, "memory_gib": memory})


def _stated_memory(name: str) -> tuple[str, tuple[float, ...]]:
    """Split off a stated size: the bare name, and the byte counts that the size may mean."""
    match = re.search(r"[(\s]\s*([\d.]+)\s*(GiB|MiB|GB)\b[^)]*\)?\s*$", name, re.IGNORECASE)
    bare = re.sub(r"\s*\([^)]*\)\s*$", "", name)
    if match is None:
        return bare, ()
    number, unit = float(match[1]), match[2].lower()
    if unit == "mib":
        return name[: match.start()], (number * MIB,)
    if "(" not in name:
        return bare, ()
    return bare, (number * GIB,) if unit == "gib" else (number * GIB, number * GB)
