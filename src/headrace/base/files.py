"""Atomic files and the user's folders for data and for what can be made again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_SAMPLES, _SAMPLE_BYTES = 64, 4096


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` so that a reader sees the old file or the new one, never a part; safe under concurrent writers."""
    import tempfile

    path.parent.mkdir(parents=True, exist_ok=True)
    raw = data.encode() if isinstance(data, str) else data
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        os.fchmod(handle, 0o644)  # a temporary file is private, the file it becomes is not
        with naming(path), os.fdopen(handle, "wb") as out:
            out.write(raw)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError say that it is about `path`: writing, flushing and syncing know a number only, so a full disk has no name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def remove_others(path: Path, pattern: str) -> None:
    """Remove the files beside `path` that match `pattern`: what it replaces."""
    for other in path.parent.glob(pattern):
        if other != path:
            other.unlink(missing_ok=True)


def identity(paths: Iterable[Path]) -> bytes:
    """A digest that changes when one of the files does: of path, size, time, inode and samples of the contents."""
    import hashlib

    found = hashlib.sha256()
    for path in paths:
        about = path.stat()
        found.update(f"{path.resolve()} {about.st_size} {about.st_mtime_ns} {about.st_ino};".encode())
        with path.open("rb", buffering=0) as file:
            for i in range(_SAMPLES):
                found.update(os.pread(file.fileno(), _SAMPLE_BYTES, about.st_size * i // _SAMPLES))
    return found.digest()


def data_dir() -> Path:
    """The user's data folder: `$HEADRACE_DATA`, else `$XDG_DATA_HOME/headrace`, else `~/.local/share/headrace`."""
    if explicit := os.environ.get("HEADRACE_DATA"):
        return Path(explicit)
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "headrace"


def cache_dir() -> Path:
    """The user's cache folder: `$HEADRACE_CACHE`, else `$XDG_CACHE_HOME/headrace`, else `~/.cache/headrace`."""
    if explicit := os.environ.get("HEADRACE_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
