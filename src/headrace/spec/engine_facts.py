"""What is known about each engine: one TOML file per engine under `spec/engines`, with a section per subject.

`[memory]` holds memory policies by version (the planner), `[launch]` flags and launch lines, `[metrics]` metric names
(the benchmark and the advisor). A subject reads its own section and ignores the others.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal

import msgspec

from headrace.base.errors import InvalidInput


class MemoryPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one range of versions of an engine divides a card's memory.

    `since`: first version it holds for. `pool` says what the KV pool is:
      total   fraction x total memory - weights - activations - outside torch (vLLM, Headrace)
      static  fraction x memory free before loading - weights (SGLang: the rest is left for activations and graphs)
      free    fraction x what is free after loading and a warm-up (TensorRT-LLM)
      context exactly what the slots need, nothing is pooled (llama.cpp)
    `fraction`: the engine's default; 0 means it is derived from what `reserve_*` leaves.
    `logit_bytes`: bytes that sampling holds at its peak per (sequence, vocabulary entry) in the profiling run;
    `logit_bytes_multimodal` the same for models with a vision part. `batched_tokens`/`sequences` are the default step budget
    and sequence limit on [cards below 70 GiB or A100, larger cards]; 0 batched tokens means one whole context per step.
    `outside_gib`: CUDA context, modules and workspaces on one GPU; `comm_gib`: added by communication when there are
    several. `graphs_gib`: captured graphs, `graphs_gib_full_batch` more for batches of up to 256 sequences (less in
    proportion for fewer); `graphs_inside` whether they come out of the fraction. `state_copies`: fixed-size states that a
    hybrid model keeps per request; `page_rounding`: attention pages of a hybrid grow to the size of its state, so that one
    pool serves both; `tokens_by_concurrency`: the printed token count is concurrency x longest context, not pages x page
    size. `fragmentation`: factor on activations (the profile saw the allocator's cache). `kv_default` "checkpoint": an FP8
    or FP4 checkpoint brings an FP8 cache; `fp8_latent_on`: generations where an MLA latent is cached in FP8 unless told
    otherwise. `residual_copies`: copies of the residual stream held beyond those of `accounting.activation_bytes`.
    `mxfp4_hidden_multiple`: the hidden size that MXFP4 expert matrices are padded to a multiple of.
    """

    since: str = "0"
    pool: Literal["total", "static", "free", "context"] = "total"
    fraction: float = 0.9
    block_tokens: int = 16
    batched_tokens: tuple[int, int] = (2048, 8192)
    batched_tokens_multimodal: int = 0
    sequences: tuple[int, int] = (256, 256)
    logit_bytes: float = 0.0
    logit_bytes_multimodal: float | None = None
    multimodal_gib: float = 0.0
    residual_copies: int = 0
    mxfp4_hidden_multiple: int = 1
    outside_gib: float = 0.4
    comm_gib: float = 0.0
    graphs_gib: float = 0.0
    graphs_gib_full_batch: float = 0.0
    graphs_inside: bool = False
    state_copies: int = 1
    page_rounding: bool = False
    tokens_by_concurrency: bool = False
    fragmentation: float = 1.0
    reserve_mib: int = 0
    reserve_mib_per_token: float = 0.0
    reserve_mib_per_graph_batch: float = 0.0
    graph_batch: tuple[int, int] = (256, 512)
    reserve_min_mib_large: int = 0
    uncertainty_gib: float = 1.0
    kv_default: Literal["auto", "checkpoint"] = "auto"
    fp8_latent_on: tuple[str, ...] = ()
    source: str = ""


class EngineFacts(msgspec.Struct, frozen=True):
    """One engine. `sections` are the raw tables by subject."""

    id: str
    name: str
    aliases: tuple[str, ...]
    sections: Mapping[str, Mapping[str, Any]]


def _fold(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", re.sub(r"\(.*", "", name).lower())


@cache
def engines() -> Mapping[str, EngineFacts]:
    """Every engine with a facts file, by id."""
    found: dict[str, EngineFacts] = {}
    for file in sorted(resources.files("headrace.spec").joinpath("engines").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            raw = tomllib.loads(file.read_text())
            sections = {key: value for key, value in raw.items() if isinstance(value, dict)}
            name = file.name.removesuffix(".toml")
            found[name] = EngineFacts(name, raw.get("name", name), tuple(raw.get("aliases", ())), sections)
    return found


def find(name: str) -> EngineFacts:
    """The engine called `name` in any spelling; `InvalidInput` lists the known ones."""
    wanted = _fold(name)
    known = engines()
    for facts in known.values():
        if wanted in {_fold(facts.id), _fold(facts.name), *(_fold(a) for a in facts.aliases)}:
            return facts
    for facts in known.values():
        if any(wanted.startswith(_fold(n)) for n in (facts.id, *facts.aliases)):
            return facts
    raise InvalidInput(f"unknown engine {name!r}", field="engine", remedy="choose one of: " + ", ".join(known))


def plain_version(version: str) -> str:
    """A version as it names a build: without case, blanks and a leading v."""
    return version.strip().lower().removeprefix("v")


def version_key(version: str) -> tuple[int, ...]:
    """A version as a comparable tuple: `~v0.6.5` is (0, 6, 5), `v0.2.x` is (0, 2); () when nothing is stated."""
    if re.search(r"\b0\.1\.dev", version):  # a nightly build numbered from zero is newer than any release
        return ()
    match = re.search(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


@cache
def memory_policies(engine: str) -> tuple[MemoryPolicy, ...]:
    """All policies of one engine (by id), oldest first."""
    section = find(engine).sections.get("memory")
    if section is None:
        known = ", ".join(facts.id for facts in engines().values() if "memory" in facts.sections)
        raise InvalidInput(f"no memory facts for {engine}", field="engine", remedy=f"choose one of: {known}")
    common = {key: value for key, value in section.items() if key != "versions"}
    merged: list[dict[str, Any]] = []
    for entry in section.get("versions", [{}]):
        # A version states what changed since the one before it.
        merged.append({**(merged[-1] if merged else common), **entry})
    return tuple(msgspec.convert(entry, MemoryPolicy) for entry in merged)


def memory_policy(engine: str, version: str = "") -> MemoryPolicy:
    """The policy of an engine at a version; without one, the newest."""
    policies = memory_policies(find(engine).id)
    key = version_key(version)
    if not key:
        return policies[-1]
    fitting = [p for p in policies if version_key(p.since) <= key]
    return fitting[-1] if fitting else policies[0]
