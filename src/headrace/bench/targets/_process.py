"""The life of a started engine: wait until it answers, know what it resolved, flush it, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from headrace.bench.endpoint import parse_url
from headrace.bench.targets import LaunchLine, TargetSpec, find_target, free_port, installed

_LOG_TAIL = 2_000


class TargetFailed(Exception):
    """An engine did not start or died; the message has the end of its log (exit code 3)."""


@dataclass(slots=True)
class RunningTarget:
    """Something that answers. `info` is what the results keep: command, environment, version, resolved settings."""

    url: str
    model: str
    info: dict[str, Any] = field(default_factory=dict)
    flush_calls: tuple[str, ...] = ()
    no_flush: str = "a server that was already running: nothing is known of its cache"

    async def flush(self) -> bool:
        """Empty the prefix cache between runs; whether that was done, and if not why, stays in `info`."""
        why = "" if self.flush_calls else self.no_flush
        timeout = aiohttp.ClientTimeout(total=60.0)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for call in self.flush_calls:
                method, _, path = call.partition(" ")
                # an empty object: without a body, the client library would call it an octet stream, which servers refuse
                async with session.request(method, self.url + path, json={}) as response:
                    if response.status != 200:
                        why = f"{call} was answered with {response.status}"
        left = f"; {self.no_flush}" if self.flush_calls and self.no_flush else ""
        self.info["cache_before"] = f"not emptied: {why}" if why else f"emptied with {self.flush_calls[0]}{left}"
        return not why


@asynccontextmanager
async def open_target(spec: TargetSpec, model: str, log: Path) -> AsyncIterator[RunningTarget]:
    """A running target; an engine is started for the time of the block, a URL is taken as it is."""
    if spec.url:
        url = parse_url(spec.url)
        yield RunningTarget(url, model, {"url": url})
        return
    target, port = find_target(spec.name), free_port()
    line = target.launch_line(model, port, spec.settings)
    if not installed(line):
        raise TargetFailed(f"{spec.name} is not installed here: no program {line.argv[0]!r} (bin=PATH names one)")
    started_s = time.monotonic()
    async with _process(line, log) as process:
        url = f"http://127.0.0.1:{port}"
        await _healthy(process, url + target.facts.health, target.facts.ready_timeout_s, log)
        info: dict[str, Any] = {
            "engine": target.engine,
            "command": ["python" if part == sys.executable else part for part in line.argv],
            "env": dict(line.env),
            "ready_s": time.monotonic() - started_s,
        }
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30.0)) as session:
            served = await _served(session, url, target.facts.ready_timeout_s)
            info["models"] = served
            if target.facts.settings:
                method, _, path = target.facts.settings.partition(" ")
                info["resolved"] = await _json(session, method, url + path)
        if target.facts.version:
            info["version"] = await _version((line.argv[0], *target.facts.version[1:]))
        calls = target.flush_calls(spec.settings)
        yield RunningTarget(url, str(served[0].get("id") or model), info, calls, target.facts.no_flush)


@asynccontextmanager
async def _process(line: LaunchLine, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *line.argv, stdout=out, stderr=out, env={**os.environ, **line.env}, start_new_session=True
        )
    try:
        yield process
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the engine and everything it started: ask first, then insist."""
    for number, wait_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), wait_s)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _healthy(process: asyncio.subprocess.Process, url: str, timeout_s: float, log: Path) -> None:
    deadline_s = time.monotonic() + timeout_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30.0)) as session:
        while time.monotonic() < deadline_s:
            if process.returncode is not None:
                raise TargetFailed(f"the engine ended with code {process.returncode} before it answered:\n{_tail(log)}")
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)
    raise TargetFailed(f"no answer from {url} within {timeout_s:.0f} s:\n{_tail(log)}")


async def _served(session: aiohttp.ClientSession, url: str, timeout_s: float) -> list[dict[str, Any]]:
    """The model cards; some front-ends are healthy before their workers have registered a model, so wait for one."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        page = await _json(session, "GET", url + "/v1/models")
        if page is None:
            return [{}]
        if page.get("data") or time.monotonic() > deadline_s:
            return list(page.get("data") or [{}])
        await asyncio.sleep(0.5)


def _tail(log: Path) -> str:
    return log.read_bytes()[-_LOG_TAIL:].decode(errors="replace") if log.exists() else ""


async def _json(session: aiohttp.ClientSession, method: str, url: str) -> Any:
    try:
        async with session.request(method, url) as response:
            return await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientError, ValueError, TimeoutError):
        return None


async def _version(argv: tuple[str, ...]) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await asyncio.wait_for(process.communicate(), 120.0)
    except (OSError, TimeoutError):
        return ""
    return said.decode(errors="replace").strip()[:500]
