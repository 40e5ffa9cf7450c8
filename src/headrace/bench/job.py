"""`job.json`: the command that a folder's runs belong to, so that it can be continued after a crash."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.base.errors import InvalidInput
from headrace.base.files import write_atomic
from headrace.bench.load_options import LoadOptions
from headrace.bench.records import META_FILE, SUMMARY_FILE, read_json
from headrace.bench.stored import read_summary

JOB_FILE = "job.json"
SECRET_HEADERS = ("authorization", "x-api-key")

Verb = Literal["run", "ab", "ladder"]


class Job(msgspec.Struct, kw_only=True):
    """One command of `headrace bench`. `options`: its own, by parameter; `load`: those of the traffic, without keys;
    `secrets`: the options whose values are not stored and have to be given again."""

    schema: str = "headrace-bench-job/1"
    verb: Verb
    options: dict[str, Any] = {}
    load: dict[str, Any] = {}
    secrets: list[str] = []

    @classmethod
    def of(cls, verb: Verb, load: LoadOptions | None = None, **options: Any) -> Job:
        if load is None:
            return cls(verb=verb, options=options)
        hidden = [text for text in load.header if _header_name(text).lower() in SECRET_HEADERS]
        secrets = [f"--header {_header_name(text)}" for text in hidden] + ["--api-key"] * bool(load.api_key)
        open_load = replace(load, api_key=None, header=tuple(text for text in load.header if text not in hidden))
        kept = {f.name: getattr(open_load, f.name) for f in fields(open_load)}
        return cls(verb=verb, options=options, load=kept, secrets=secrets)

    def load_options(self, *, api_key: str | None = None, header: tuple[str, ...] = ()) -> LoadOptions:
        """The traffic's options, with the keys given again; `InvalidInput` names one that is missing."""
        given = {f"--header {_header_name(text)}" for text in header} | ({"--api-key"} if api_key else set())
        for name in self.secrets:
            if name not in given:
                field, _, of = name.partition(" ")
                raise InvalidInput(
                    f"the run used a key{f' ({of})' if of else ''}, which is not stored",
                    field=field,
                    remedy="give it again",
                )
        try:
            load = msgspec.convert(self.load, LoadOptions)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"{JOB_FILE} is damaged: {error} of load", field="DIR") from None
        return replace(load, api_key=api_key, header=(*load.header, *header))


def _header_name(text: str) -> str:
    return text.partition(":")[0].strip()


def write_job(out: Path, job: Job) -> None:
    """Write `job.json` into a new folder."""
    write_atomic(out / JOB_FILE, msgspec.json.format(msgspec.json.encode(job), indent=1))


def read_job(out: Path) -> Job | None:
    """The command of a folder; None where it has none (a run made from Python)."""
    path = out / JOB_FILE
    if not path.exists():
        return None
    return read_json(path, Job)


def finished_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a run of a series that had finished before; else None, and `folder` is free for the run.

    A run that was cut off is sent again as a whole, so that no run of a series has a gap in it or spans two starts of
    a server; what it had recorded is kept beside it, under `NAME.interrupted-K`.
    """
    meta = folder / META_FILE
    if meta.exists() and read_json(meta, dict[str, Any]).get("finished") and (folder / SUMMARY_FILE).exists():
        return read_summary(folder)
    if folder.exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.interrupted-{number}")).exists():
            number += 1
        folder.rename(aside)
    return None
