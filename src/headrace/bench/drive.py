"""Sends the traffic: one process's share of a run, from intended times to records."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from headrace.bench.arrivals import Arrivals, Closed, Trace
from headrace.bench.client import Client
from headrace.bench.records import Outcome, RequestRecord
from headrace.bench.ticker import Ticker
from headrace.bench.traffic import Call, Script, Session, Stage

_PREPARE_S = 0.05
_AHEAD = 4
_USABLE = (Outcome.OK, Outcome.WRONG_LENGTH)


@dataclass(frozen=True, slots=True)
class Share:
    """Which sessions this process sends: those with `index % of == part`."""

    part: int = 0
    of: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop: after `requests` requests in all (None: no limit), or at `until_s` of the run's clock."""

    requests: int | None
    until_s: float | None = None


OnRecord = Callable[[RequestRecord], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A session with its first prompts written. `at_s`: when it starts, None for a free slot; `first`: its first index."""

    session: Session
    at_s: float | None
    first: int
    script: Script
    stage: Stage


class Lookahead:
    """Writes the first prompts of the next sessions while the loop is idle, so that writing them never delays a send."""

    def __init__(self, source: Iterator[Prepared]) -> None:
        self._source = source
        self._ready: deque[Prepared] = deque()
        self._fill()

    def take(self) -> Prepared | None:
        """The next session, or None when there are no more."""
        found = self._ready.popleft() if self._ready else next(self._source, None)
        asyncio.get_running_loop().call_soon(self._fill_one)
        return found

    def _fill(self) -> None:
        while len(self._ready) < _AHEAD and self._fill_one():
            pass

    def _fill_one(self) -> bool:
        if len(self._ready) >= _AHEAD or (prepared := next(self._source, None)) is None:
            return False
        self._ready.append(prepared)
        return True


class Driver:
    """Runs sessions against one client.

    `done`: indices that an interrupted run has already recorded; `start_s`: where its clock goes on.

    Request numbers are counted over all sessions, whichever process sends them, so they do not depend on `Share`.
    Calls beyond the limit are not sent, and a session that meets a failed call ends there: what follows would not be
    the conversation that was declared. `unsent` counts both kinds of calls that a session did not come to.
    """

    def __init__(
        self,
        client: Client,
        arrivals: Arrivals,
        limits: Limits,
        share: Share,
        on_record: OnRecord,
        done: frozenset[int],
        start_s: float = 0.0,
    ) -> None:
        self._client, self._arrivals, self._limits = client, arrivals, limits
        self._share, self._on_record, self._done, self._start_s = share, on_record, done, start_s
        self._ticker = Ticker()
        self.unsent = 0
        self.exhausted = False

    async def run(self, sessions: Iterator[Session]) -> None:
        """Send everything; returns when the last answer has ended."""
        try:
            mine = self._mine(self._arrivals.starts(sessions))
            if isinstance(self._arrivals, Closed):
                slots = self._arrivals.concurrency // self._share.of
                slots += self._share.part < self._arrivals.concurrency % self._share.of
                ahead = Lookahead(mine)
                await asyncio.gather(*(self._slot(ahead) for _ in range(slots)))
            else:
                await self._open(mine)
        finally:
            self._ticker.close()

    def _mine(self, starts: Iterator[tuple[Session, float | None]]) -> Iterator[Prepared]:
        first = 0
        for session, at_s in starts:
            if self._limits.requests is not None and first >= self._limits.requests:
                return
            if session.index % self._share.of == self._share.part:
                calls = range(first, first + session.num_calls)
                wanted = [i for i in calls if self._limits.requests is None or i < self._limits.requests]
                if not all(i in self._done for i in wanted):
                    script = session.script()
                    yield Prepared(session, at_s, first, script, next(script))
            first += session.num_calls
        self.exhausted = True

    async def _slot(self, ahead: Lookahead) -> None:
        free_s = self._start_s
        await self._ticker.sleep_until(self._client.origin_s + free_s)
        while (prepared := ahead.take()) is not None:
            if self._over(max(free_s, self._client.now())):
                return
            free_s = await self._session(prepared, free_s)

    async def _open(self, mine: Iterator[Prepared]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for prepared in mine:
                assert prepared.at_s is not None
                if self._over(prepared.at_s):
                    return
                # The prompt is written ahead of its time, so that writing it does not make the send late.
                await self._ticker.sleep_until(self._client.origin_s + prepared.at_s - _PREPARE_S)
                tasks.create_task(self._session(prepared, prepared.at_s))

    def _over(self, at_s: float) -> bool:
        return self._limits.until_s is not None and at_s >= self._limits.until_s

    async def _session(self, prepared: Prepared, start_s: float) -> float:
        """Play one session; returns when it ended on the run's clock."""
        session, first, script = prepared.session, prepared.first, prepared.script
        stage: Stage | None = prepared.stage
        ready_s, sent, number = start_s, 0, 0
        while stage is not None:
            if isinstance(self._arrivals, Trace) and stage.not_before_s is not None:
                ready_s = max(ready_s, stage.not_before_s * self._arrivals.time_scale)
            when_s = ready_s + stage.pause_s
            room = len(stage.calls)
            if self._limits.requests is not None:
                room = min(room, self._limits.requests - first - sent)
            if room <= 0 or (number and self._over(when_s)):
                break
            await self._ticker.sleep_until(self._client.origin_s + when_s)
            records = [
                RequestRecord(
                    index=first + sent + branch, session=session.index, stage=number, branch=branch, intended_s=when_s
                )
                for branch in range(room)
            ]
            sends: list[Awaitable[str]] = [
                self._send(call, record) for call, record in zip(stage.calls, records, strict=False)
            ]
            replies = list(await asyncio.gather(*sends))
            sent += room
            number += 1
            ready_s = max(record.end_s for record in records)
            if room < len(stage.calls) or any(record.outcome not in _USABLE for record in records):
                break
            try:
                stage = script.send(replies)
            except StopIteration:
                stage = None
        self.unsent += session.num_calls - sent
        return ready_s

    async def _send(self, call: Call, record: RequestRecord) -> str:
        text = await self._client.send(call, record)
        self._on_record(record)
        return text
