"""Packed weights on disk, so that a later start reads what an earlier one made.

An entry is found by the identity of the files it was made from (path, size, time, inode and samples of their contents),
by the layout and by the build that packed it; its bytes are checked by a digest before they are used. Where the system keeps
the file in huge pages they are used in place, so that a start copies nothing and processes share one copy; elsewhere they are
copied into huge pages. Entries appear by renaming and are never written again, so concurrent starts see a whole one or none,
and a replaced one stays as it was for those that use it. Whatever goes wrong here costs time, never a start.
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

from headrace.base.files import cache_dir, identity, naming, remove_others
from headrace.base.units import ceil_div
from headrace.engine.native.arena import Arena
from headrace.engine.native.memory import buffer, huge_file_bytes, mapped
from headrace.spec.locate import ModelFiles

log = logging.getLogger("headrace.engine")

SMALLEST_BYTES = 16 << 20
"""Less than this is packed faster than it is looked up."""
_MAGIC = b"HRPACK2\0"
_HEAD = struct.Struct("<8s32sQQ")
_PAGE = 2 << 20
"""Huge."""
_PAYLOAD_AT = _PAGE
"""Only huge pages of a file that begin at a multiple of their size can be mapped as such."""
_MOSTLY = 0.9
_ABANDONED_S = 3600.0
_UNUSED_S = 30 * 86400.0
"""After so long without a start that read it an entry goes when another is written."""


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
        with suppress(OSError):  # the cache may belong to someone else
            os.utime(path)
        log.info("packed weights read from %s", path)
        return found
    memory = arena.fill(pool)
    try:
        write(path, key, memory, pool)
    except OSError as error:
        log.warning("packed weights are not cached: %s", error)
    return memory


def read(path: Path, key: bytes, nbytes: int, pool: headrace_native.Pool) -> np.ndarray | None:
    """The payload of an entry, perhaps read-only, or None if there is none or it is not what it should be (which is logged)."""
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
        before = huge_file_bytes()
        memory = mapped(file.fileno(), _PAYLOAD_AT, nbytes)
    if headrace_native.checksum(memory, pool) != _HEAD.unpack(head)[3]:
        log.warning("%s is damaged: packing again", path)
        return None
    # a step of one row takes a quarter more time over small pages
    return memory if huge_file_bytes() - before >= nbytes * _MOSTLY else _copied(memory, pool.threads)


def _copied(memory: np.ndarray, threads: int) -> np.ndarray:
    """In huge pages. Most of the time goes to pages that are touched for the first time, so each thread has its own."""
    copy = buffer(len(memory))
    share = ceil_div(len(copy), threads * _PAGE) * _PAGE
    parts = [slice(at, at + share) for at in range(0, len(copy), share)]
    others = [threading.Thread(target=np.copyto, args=(copy[part], memory[part])) for part in parts[1:]]
    for thread in others:
        thread.start()
    np.copyto(copy[parts[0]], memory[parts[0]])
    for thread in others:
        thread.join()
    return copy


def write(path: Path, key: bytes, memory: np.ndarray, pool: headrace_native.Pool) -> None:
    """Store an entry and remove what it replaces. Not synced: a digest tells whether all of it reached the disk."""
    import tempfile

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".packing.")
    try:
        with naming(path), os.fdopen(handle, "wb", buffering=0) as out:
            head = _HEAD.pack(_MAGIC, key, len(memory), headrace_native.checksum(memory, pool))
            out.write(head)
            out.seek(_PAYLOAD_AT)  # what is left out takes no room
            view = memoryview(memory)  # in long pieces: a system that can keeps each in huge pages
            while len(view):
                view = view[out.write(view) :]
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    remove_others(path, path.name.rpartition("-")[0] + "-*.bin")
    for pattern, age_s in ((".packing.*", _ABANDONED_S), ("*.bin", _UNUSED_S)):
        for left in path.parent.glob(pattern):
            with suppress(OSError):  # another start has just renamed or removed it, or it is not ours to remove
                if time.time() - left.stat().st_mtime > age_s:
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
    found = hashlib.sha256(_MAGIC + arena.layout_digest())
    build = Path(headrace_native._native.__file__).stat()
    found.update(f"{build.st_size} {build.st_mtime_ns};".encode())
    found.update(identity(files.weights))
    return found.digest()
