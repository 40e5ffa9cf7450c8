"""Round to nearest: every value to the nearest of its group's grid, nothing else known."""

from __future__ import annotations

from headrace.engine.quant.formats import Format, Packed
from headrace.engine.quant.methods._contract import LayerWork, Settings


class RoundToNearest:
    calibrated = False

    def refuse(self, form: Format, *, sparse: bool) -> str | None:
        return None

    def quantize(self, work: LayerWork, form: Format, settings: Settings) -> dict[str, Packed]:
        return {name: form.quantize(work.tensors[name], name) for name in work.matrices}


METHOD = RoundToNearest()
