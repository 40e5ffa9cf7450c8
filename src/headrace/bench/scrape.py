"""Samples of a server's metrics page while a run goes on, and of the GPUs' energy counters where NVML is present."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import re
import time
from collections.abc import Callable, Mapping

import aiohttp

from headrace.bench.records import RecordLog, ServerSample
from headrace.spec.engine_serving import MetricNames, metric_names

_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})?\s+([^\s]+)")


def parse_metrics(text: str) -> dict[str, float]:
    """Sum of each metric over its labels, from the Prometheus text format; comments and broken lines are left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            with contextlib.suppress(ValueError):
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def recognise(page: Mapping[str, float]) -> tuple[str, MetricNames] | None:
    """The engine whose names the page holds most of, or None."""
    scored = [(len(names.all() & page.keys()), engine, names) for engine, names in metric_names().items()]
    count, engine, names = max(scored, key=lambda entry: entry[0])
    return (engine, names) if count else None


def sample_of(page: Mapping[str, float], names: MetricNames, at_s: float) -> ServerSample:
    """The page's values under our names. A hit rate without counters becomes hits of 1 query."""

    def first(alternatives: tuple[str, ...]) -> float | None:
        return next((page[name] for name in alternatives if name in page), None)

    return ServerSample(
        at_s=at_s,
        running=first(names.running),
        waiting=first(names.waiting),
        kv_usage=first(names.kv_usage),
        prefix_queries=first(names.prefix_queries),
        prefix_hits=first(names.prefix_hits),
    )


class Scraper:
    """Reads the metrics page every `period_s` from `start` to `stop`, one more time at each end.

    `engine` is the engine recognised, "" where there is no page or it is of an unknown engine. Failures to read are
    counted in `missed` and otherwise ignored: the run does not depend on it.
    """

    def __init__(self, base: str, headers: Mapping[str, str], log: RecordLog, origin_s: float, period_s: float) -> None:
        self.engine = ""
        self.missed = 0
        self._base, self._headers, self._log = base, headers, log
        self._origin_s, self._period_s = origin_s, period_s
        self._energy = energy_counter()
        self._names: MetricNames | None = None
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0))
        for path in dict.fromkeys(names.path for names in metric_names().values()):
            page = await self._page(path)
            if page and (found := recognise(page)):
                self.engine, self._names = found
                break
        if self._names or self._energy:
            await self._sample()
            self._task = asyncio.create_task(self._loop())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            await self._sample()
        if self._session is not None:
            await self._session.close()

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            await self._sample()

    async def _sample(self) -> None:
        at_s = time.monotonic() - self._origin_s
        sample = ServerSample(at_s=at_s)
        if self._names is not None:
            page = await self._page(self._names.path)
            if page is None:
                self.missed += 1
                return
            sample = sample_of(page, self._names, at_s)
        if self._energy and not math.isnan(joules := self._energy()):
            sample.energy_j = joules
        self._log.append(sample)

    async def _page(self, path: str) -> dict[str, float] | None:
        assert self._session is not None
        try:
            async with self._session.get(self._base + path, headers=self._headers) as response:
                return parse_metrics(await response.text()) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None


def energy_counter() -> Callable[[], float] | None:
    """A function that gives joules used by all GPUs of this host since the driver was loaded.

    None without NVML, without a GPU, or where one of them does not count: a part of the energy is no figure.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    devices = [ctypes.c_void_p() for _ in range(count.value)]
    if any(nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(device)) for i, device in enumerate(devices)):
        return None

    def joules() -> float:
        total = 0.0
        for device in devices:
            millijoules = ctypes.c_ulonglong()
            if nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)):
                return math.nan
            total += millijoules.value / 1e3
        return total

    return joules if devices and not math.isnan(joules()) else None
