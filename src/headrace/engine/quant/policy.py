"""What stays unquantized: by the part of the model that a matrix belongs to, and by what a checkpoint says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.base.errors import InvalidInput
from headrace.spec.accounting import UNQUANTIZED_PARTS, gguf_part
from headrace.spec.quantization import module_part

_LAYER = re.compile(r"(?:^|\.)(?:layers|blk|h)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Policy:
    """Which matrices are quantized: those of no part in `parts` whose module matches none of `modules`.

    By default embedding, output head, routers and norms stay: lookups gain little, the rest is small or sensitive.
    `modules` are patterns as in `quantization_config`: a regular expression after `re:`, else a run of a name's components.
    """

    parts: frozenset[str] = UNQUANTIZED_PARTS
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern in self.modules:
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except re.error as error:
                raise InvalidInput(
                    f"{pattern!r} is not a regular expression: {error}",
                    field="modules",
                    remedy="correct the list of modules that are left as they are",
                ) from None

    def keeps(self, module: str) -> str | None:
        """Why the matrix of `module` (a tensor's name without `.weight`) stays as it is, or None if it is quantized."""
        part = part_of(module)
        if part in self.parts:
            return f"{part} stays unquantized"
        return self.named(module)

    def named(self, module: str) -> str | None:
        """The pattern that keeps `module`, or None."""
        return next((pattern for pattern in self.modules if matches(pattern, module)), None)


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern of a `quantization_config` names a module."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern.strip('.')}." in f".{module}."


def part_of(module: str) -> str:
    """The part of the model (`headrace.spec.tensors`) that a module belongs to, by its name; `extra` if none."""
    if module.startswith(("blk.", "output", "token_embd")):
        return gguf_part(f"{module}.weight")
    return module_part(module) or "extra"


def layer_of(module: str) -> int:
    """The layer that a module is in; -1 outside the layers."""
    found = _LAYER.search(module)
    return int(found[1]) if found else -1


def kept_parts(plain: Iterable[str], quantized: Iterable[str]) -> frozenset[str] | None:
    """Parts (with `@layer`) that `headrace.spec.accounting.weight_bytes` must leave unquantized when these modules are plain
    and those quantized; None if a part of one layer has some of each, which it cannot say."""
    kept = {(part_of(m), layer_of(m)) for m in plain}
    packed = {(part_of(m), layer_of(m)) for m in quantized}
    if kept & packed:
        return None
    base = UNQUANTIZED_PARTS - {part for part, _ in packed}
    return base | {part if layer < 0 else f"{part}@{layer}" for part, layer in kept}
