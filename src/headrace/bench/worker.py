"""A process that sends one share of a run: `python -m headrace.bench.worker DIR PART OF`.

It says READY, gets a `Start` as one line of JSON on stdin (keys stay out of files and command lines), and then says R for
each ended request and a `ShareReport` at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.base.errors import InvalidInput
from headrace.bench.arrivals import Closed
from headrace.bench.client import Client
from headrace.bench.drive import Driver, Limits, OnRecord, Share
from headrace.bench.records import RecordLog, RequestRecord
from headrace.bench.settings import RunSettings
from headrace.bench.traffic import Fitting
from headrace.bench.workloads import find_workload, workload_options


class ShareReport(msgspec.Struct):
    """What a share of a run says at its end."""

    unsent: int
    skipped: int
    clipped: int
    exhausted: bool


class RunMeta(msgspec.Struct, kw_only=True):
    """`run.json`: settings as resolved, and what is known beside them. `origin_s`: CLOCK_MONOTONIC of the run's zero.

    `load_average`: of this host over the last minute, before and after the run. `foreign_cores`: used by programs that
    are neither the client nor a target it started; None for a target that was already running.
    """

    schema: str = "headrace-bench-run/1"
    settings: RunSettings
    created: str = ""
    host: dict[str, str] = {}
    notes: list[str] = []
    origin_s: float = 0.0
    resumed_at_s: list[float] = []
    load_average: list[float] = []
    foreign_cores: float | None = None
    headroom: dict[str, float | int | str | bool] | None = None
    finished: bool = False


class Start(msgspec.Struct):
    """What a client process sends, and from which moment of CLOCK_MONOTONIC."""

    settings: RunSettings
    origin_s: float


def part_file(part: int, of: int) -> str:
    """Name of the record file of one process."""
    return "records.jsonl" if of == 1 else f"records.{part}.jsonl"


async def drive_share(
    settings: RunSettings, origin_s: float, share: Share, on_record: OnRecord, done: frozenset[int] = frozenset(),
    already_s: float = 0.0,
) -> ShareReport:  # fmt: skip
    """Send one share of a run; `done` and `already_s` belong to an interrupted run that goes on."""
    kind = find_workload(settings.workload)
    options = workload_options(kind, settings.workload_options)
    context = settings.context(settings.prompt_writer())
    arrivals = settings.arrivals.resolve(has_arrivals=kind.gives_arrivals(settings.arrivals.kind), seed=settings.seed)
    until_s = None if settings.duration_s is None else max(settings.duration_s, already_s)
    client = Client(settings.endpoint, origin_s)
    try:
        await client.connect(arrivals.concurrency // share.of + 1 if isinstance(arrivals, Closed) else 8)
        driver = Driver(client, arrivals, Limits(settings.limit, until_s), share, on_record, done, already_s)
        try:
            await driver.run(kind.sessions(options, context))
        except BaseExceptionGroup as group:  # sessions are made while others are sent
            if (wrong := joined(group)) is None:
                raise
            raise wrong from None
    finally:
        await client.close()
    fitting: Fitting = context.fitting
    return ShareReport(driver.unsent, fitting.skipped, fitting.clipped, driver.exhausted)


def joined(group: BaseExceptionGroup[BaseException]) -> InvalidInput | None:
    """All that is wrong with the input as one error; None if the group holds anything else, which it must not hide."""
    found: dict[str, InvalidInput] = {}
    for error in _single(group):
        if not isinstance(error, InvalidInput):
            return None
        found[str(error)] = error
    if len(found) == 1:
        return next(iter(found.values()))
    fields = {error.field for error in found.values()}
    return InvalidInput("; ".join(found), field=fields.pop() if len(fields) == 1 else None)


def _single(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _single(error)
        else:
            yield error


def _main() -> None:
    import uvloop

    folder, part, of = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    print("READY", flush=True)
    start = msgspec.json.decode(sys.stdin.readline(), type=Start)
    with RecordLog(folder / part_file(part, of)) as log:

        def keep(record: RequestRecord) -> None:
            log.append(record)
            print("R", flush=True)

        report = uvloop.run(drive_share(start.settings, start.origin_s, Share(part, of), keep))
    print(msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    _main()
