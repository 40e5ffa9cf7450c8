"""Holding every engine to AVX2 on a processor that has AVX-512, and seeing whether it kept to it (Linux, x86-64)."""

from __future__ import annotations

import time
from pathlib import Path

from noise import family

_NAMES = "X86_V4 AVX512_ICL AVX512_SPR AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL"
# What the libraries of the engines look at: the C library's string functions and numpy; OpenVINO's plugin and the oneDNN inside it,
# which fails without the former; torch, oneDNN and MKL.
COMMON = {
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=" + ",".join(f"-AVX512{n}" for n in ("F", "VL", "BW", "CD", "DQ")),
    "NPY_DISABLE_CPU_FEATURES": _NAMES,
}
OPENVINO = {"OV_CPU_MAX_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
TORCH = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


class Avx512Use:
    """How much of the CPU time that these processes and their children took over the block is that of threads which used AVX-512.

    The kernel notes it whenever it takes a thread off its core with such registers in use (`arch_status`), so a thread that
    computes with them is seen, and one that does so for a moment may be missed. `share` is 0 where the kernel tells nothing.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self.share = 0.0

    def _threads(self) -> dict[Path, tuple[int, int]]:
        """By thread: clock ticks of CPU, and milliseconds since it used AVX-512, -1 for never."""
        found = {}
        for task in (t for p in family(self.root) for t in Path(f"/proc/{p.pid}/task").glob("*")):
            try:
                status, fields = (
                    (task / "arch_status").read_text(),
                    (task / "stat").read_text().rpartition(")")[2].split(),
                )
            except OSError:  # ended meanwhile, or a kernel without it
                continue
            ago = [int(line.partition(":")[2]) for line in status.splitlines() if line.startswith("AVX512_elapsed_ms")]
            found[task] = (int(fields[11]) + int(fields[12]), ago[0] if ago else -1)
        return found

    def __enter__(self) -> Avx512Use:
        self._began, self._before = time.monotonic(), self._threads()
        return self

    def __exit__(self, *_: object) -> None:
        within_ms = 1000 * (time.monotonic() - self._began)
        took = {t: (ticks - self._before.get(t, (0, 0))[0], ago) for t, (ticks, ago) in self._threads().items()}
        wide = sum(ticks for ticks, ago in took.values() if 0 <= ago < within_ms)
        self.share = wide / max(1, sum(ticks for ticks, _ in took.values()))
