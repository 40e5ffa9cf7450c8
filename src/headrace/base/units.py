"""Units. GB is 10^9 bytes and GiB is 2^30 bytes; every name and every print says which."""

from __future__ import annotations

KB = 10**3
MB = 10**6
GB = 10**9
KIB = 2**10
MIB = 2**20
GIB = 2**30


def format_bytes(count: float) -> str:
    """Render a byte count in decimal units, e.g. `537 MB`; exact below 1 kB."""
    for unit, size in (("TB", 10**12), ("GB", GB), ("MB", MB), ("kB", KB)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}" if abs(count) / size < 1000 else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} B"


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b, for b > 0."""
    return -(-a // b)
