"""Packed weights on disk, so that a later start reads what an earlier one made.

An entry is found by the identity of the files it was made from (path, size, time, inode and samples of their contents),
by the layout and by the build that packed it; its bytes are checked by a digest before they are used. Entries appear by
renaming, so concurrent starts see a whole one or none. Whatever goes wrong here costs time, never a start.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

import headrace_native
import numpy as np

from headrace.base.files import cache_dir, identity, remove_others
from headrace.base.units import ceil_div
from headrace.engine.native.arena import Arena
from headrace.engine.native.memory import buffer
from headrace.spec.locate import ModelFiles

log = logging.getLogger("headrace.engine")

SMALLEST_BYTES = 16 << 20
"""Less than this is packed faster than it is looked up."""
_MAGIC = b"HRPACK1\0"
_HEAD = struct.Struct("<8s32sQQ")
_PAYLOAD_AT = 4096
_ABANDONED_S = 3600.0
_PAGE = 2 << 20
"""No thread begins within another's huge page."""


def cached_weights(files: ModelFiles, arena: Arena, pool: headrace_native.Pool) -> np.ndarray | None:
    """The arena's bytes from the cache, else packed now and stored; None where caching is not worth it."""
    if arena.nbytes < SMALLEST_BYTES:
        return None
    try:
        folder = cache_dir() / "packed"
        key = _key(files, arena)
        path = folder / f"{_stem(files)}-{_place(files, arena)}-{key.hex()[:16]}.bin"
        found = read(path, key, arena.nbytes, pool)
    except OSError as error:
        log.warning("packed weights are not cached: %s", error)
        return None
    if found is not None:
        log.info("packed weights read from %s", path)
        return found
    memory = arena.fill(pool)
    try:
        write(path, key, memory, pool)
    except OSError as error:
        log.warning("packed weights are not cached: %s", error)
    return memory


def read(path: Path, key: bytes, nbytes: int, pool: headrace_native.Pool) -> np.ndarray | None:
    """The payload of an entry, or None if there is none or it is not what it should be (which is logged)."""
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        return None
    with file:
        head = file.read(_HEAD.size)
        whole = len(head) == _HEAD.size and _HEAD.unpack(head)[:3] == (_MAGIC, key, nbytes)
        if not whole or os.fstat(file.fileno()).st_size != _PAYLOAD_AT + nbytes:
            log.warning("%s is damaged: packing again", path)
            return None
        memory = buffer(nbytes)
        _read_side_by_side(file.fileno(), memoryview(memory), pool.threads)
    if headrace_native.checksum(memory, pool) != _HEAD.unpack(head)[3]:
        log.warning("%s is damaged: packing again", path)
        return None
    return memory


def _read_side_by_side(file: int, view: memoryview, threads: int) -> None:
    """Fill `view` from the payload. Most of the time goes to pages that are touched for the first time, so each thread has its own."""

    def run(at: int, end: int) -> None:
        while at < end and (count := os.preadv(file, [view[at:end]], _PAYLOAD_AT + at)):
            at += count

    share = ceil_div(len(view), threads * _PAGE) * _PAGE
    parts = [(at, min(at + share, len(view))) for at in range(0, len(view), share)]
    others = [threading.Thread(target=run, args=part) for part in parts[1:]]
    for thread in others:
        thread.start()
    run(*parts[0])
    for thread in others:
        thread.join()


def write(path: Path, key: bytes, memory: np.ndarray, pool: headrace_native.Pool) -> None:
    """Store an entry and remove what it replaces. Not synced: a digest tells whether all of it reached the disk."""
    import tempfile

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".packing.")
    try:
        with os.fdopen(handle, "wb", buffering=0) as out:
            head = _HEAD.pack(_MAGIC, key, len(memory), headrace_native.checksum(memory, pool))
            out.write(head.ljust(_PAYLOAD_AT, b"\0"))
            view = memoryview(memory)
            while len(view):
                view = view[out.write(view) :]
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    remove_others(path, path.name.rpartition("-")[0] + "-*.bin")
    for left in path.parent.glob(".packing.*"):
        with suppress(FileNotFoundError):  # another start has just renamed it
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                left.unlink()


def _stem(files: ModelFiles) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in files.name)[:60]


def _place(files: ModelFiles, arena: Arena) -> str:
    """What stays the same when the model's files are replaced, so that the new entry takes the old one's place."""
    found = hashlib.sha256(arena.layout_digest())
    for path in files.weights:
        found.update(str(path.resolve()).encode() + b"\0")
    return found.hexdigest()[:12]


def _key(files: ModelFiles, arena: Arena) -> bytes:
    found = hashlib.sha256(arena.layout_digest())
    build = Path(headrace_native._native.__file__).stat()
    found.update(f"{build.st_size} {build.st_mtime_ns};".encode())
    found.update(identity(files.weights))
    return found.digest()
