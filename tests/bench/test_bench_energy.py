"""Energy: a shared library with NVML's entry points stands in for the driver's, so that the calls themselves are real."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from test_bench_run import golden, load, once

from headrace.bench import scrape
from headrace.bench.records import read_samples

SOURCE = """
#include <stddef.h>
static unsigned long long used[2];                      /* millijoules */
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = GPUS; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    if (index >= GPUS) return 2;
    *device = &used[index];
    return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    size_t index = (unsigned long long *)device - used;
    if (index == MUTE) return 3;                        /* NVML_ERROR_NOT_SUPPORTED */
    used[index] += 1500 * (index + 1);
    *millijoules = 7000000000000ULL + used[index];      /* more than 32 bits */
    return 0;
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    honest = ctypes.CDLL

    def install(gpus: int, mute: int = -1) -> None:
        path = tmp_path / f"nvml-{gpus}-{mute}.so"
        defines = (f"-DGPUS={gpus}", f"-DMUTE=((size_t)({mute}))")
        subprocess.run(
            [compiler, "-shared", "-fPIC", *defines, "-x", "c", "-", "-o", path], input=SOURCE.encode(), check=True
        )

        def opened(name: str | None, **how: bool) -> ctypes.CDLL:
            return honest(str(path) if name == "libnvidia-ml.so.1" else name, **how)

        monkeypatch.setattr(scrape.ctypes, "CDLL", opened)

    return install


async def test_a_run_counts_the_energy_of_all_gpus(driver, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    driver(2)
    async with golden() as (_, url):
        summary = await once(load(url), tmp_path / "r")
    samples = read_samples(tmp_path / "r" / "samples.jsonl")
    # The stand-in adds 1.5 J and 3 J each time it is asked.
    assert summary["energy"]["joules"] == pytest.approx(4.5 * (len(samples) - 1))
    tokens = summary["tokens"]["output"]
    assert summary["energy"]["joules_per_output_token"] == pytest.approx(4.5 * (len(samples) - 1) / tokens)
    assert samples[0].energy_j == pytest.approx(14e9 + 9.0)


@pytest.mark.parametrize(("gpus", "mute"), [(0, -1), (2, 1)])
async def test_no_gpu_or_one_that_does_not_count_is_no_figure(driver, tmp_path: Path, gpus: int, mute: int) -> None:  # type: ignore[no-untyped-def]
    driver(gpus, mute)
    assert scrape.energy_counter() is None
    async with golden() as (_, url):
        assert (await once(load(url), tmp_path / "r"))["energy"] is None


def test_without_the_library_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        assert name == "libnvidia-ml.so.1"
        raise OSError(name)

    monkeypatch.setattr(scrape.ctypes, "CDLL", missing)
    assert scrape.energy_counter() is None
