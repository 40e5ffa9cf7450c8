"""What a quantization has finished, in its folder: one line per layer, only ever appended, so that it can be continued."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.base.errors import InvalidInput
from headrace.base.files import naming

NAME = "quantize.jsonl"
_PARTS = {"part": str, "tensors": list, "bytes": int, "file_bytes": int}
"""What every line but the first holds."""


class Journal:
    """The journal of `folder`, locked for this process. A line is written after the file that it names is complete.

    InvalidInput if another process holds it, or if it was begun with other settings than `settings`.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / NAME).open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise InvalidInput(f"another process is quantizing into {folder}", field="out") from None
        self.done: dict[str, dict[str, Any]] = {}
        lines = self._lines()
        if not lines:
            if any(p.suffix == ".safetensors" or p.name == "config.json" for p in folder.iterdir()):
                self.close()
                raise InvalidInput(f"{folder} holds a model already", field="out", remedy="give an empty folder")
            self._append({"settings": dict(settings)})
            return
        begun = lines[0].get("settings", {})
        other = sorted(k for k in begun.keys() | settings.keys() if begun.get(k) != settings.get(k))
        if other:
            self.close()
            raise InvalidInput(
                f"{folder} was begun with another {', '.join(other)}",
                field="out",
                remedy="repeat the command it was begun with, or give an empty folder",
            )
        self.done = {line["part"]: line for line in lines[1:]}

    def finish(self, part: str, **facts: Any) -> None:
        """Say that `part` is complete on disk."""
        line = {"part": part, **facts}
        self._append(line)
        self.done[part] = line

    def close(self) -> None:
        self._file.close()

    def _lines(self) -> list[dict[str, Any]]:
        """Whole lines; what a crash left of a last one is cut off."""
        self._file.seek(0)
        raw = self._file.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            self._file.truncate(len(whole))
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise self._damaged(str(error)) from None
        if not lines:
            return []
        first, *rest = lines
        if not isinstance(first, dict) or not isinstance(first.get("settings"), dict):
            raise self._damaged("it does not begin with settings")
        if not all(isinstance(line, dict) and _PARTS.items() <= _types(line).items() for line in rest):
            raise self._damaged("a line does not say what was finished")
        return lines

    def _damaged(self, how: str) -> InvalidInput:
        self.close()
        return InvalidInput(f"{NAME} is damaged: {how}", field="out", remedy="give an empty folder")

    def _append(self, line: Mapping[str, Any]) -> None:
        with naming(Path(self._file.name)):
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())


def _types(line: Mapping[str, Any]) -> dict[str, type]:
    return {key: type(value) for key, value in line.items()}
