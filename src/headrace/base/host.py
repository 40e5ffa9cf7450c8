"""What a record says of the machine it was taken on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def host() -> dict[str, str]:
    """`processor`, `cores` that the system shows, and `system` with its version (what follows names a build)."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    return {"processor": processor, "cores": str(os.cpu_count()), "system": system}
