"""Post-training quantization of a model, layer by layer, into a folder that can be served (or continued).

A layer is read, run over the calibration text, quantized and written before the next is read, so memory holds one layer
whatever the model's size. Each next layer sees what the quantized ones before it give, errors included.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.base.errors import CorruptCheckpoint, HeadraceError, InvalidInput, UnsupportedModel
from headrace.base.files import naming, write_atomic
from headrace.engine.models import MODELS
from headrace.engine.models._support import unsupported
from headrace.engine.quant import export
from headrace.engine.quant.calibration import CalibrationText, LayerRun, Outlines, outline_of_layer
from headrace.engine.quant.formats import Format, form
from headrace.engine.quant.journal import NAME as JOURNAL
from headrace.engine.quant.journal import Journal
from headrace.engine.quant.methods import METHODS
from headrace.engine.quant.methods._contract import LayerWork, Method, Settings
from headrace.engine.quant.originals import Original, original
from headrace.engine.quant.policy import Policy, layer_of, matches
from headrace.engine.weights.checkpoint import Checkpoint
from headrace.engine.weights.names import Names
from headrace.engine.weights.safetensors import INDEX, SafetensorsSource, checkpoint_paths
from headrace.spec.locate import ModelFiles
from headrace.spec.model import ModelSpec, MoE

_ENDS = "ends"


@dataclass(frozen=True, slots=True)
class Progress:
    """After layer `done` of `total`: its relative loss, the share of its outputs' energy that is error (without calibration:
    of its weights'), and whether it had been finished by an earlier run."""

    done: int
    total: int
    loss: float
    resumed: bool


@dataclass(frozen=True, slots=True)
class Result:
    """`bytes_before` and `bytes_after`: of all tensors in the files."""

    folder: Path
    bytes_before: int
    bytes_after: int
    losses: tuple[float, ...]


@torch.inference_mode()
def quantize(
    files: ModelFiles,
    weights: str,
    method: str,
    out: Path,
    *,
    calibration: CalibrationText | None = None,
    settings: Settings | None = None,
    policy: Policy | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Result:
    """Quantize the matrices of `files` to format `weights` by `method` and write a compressed-tensors folder to `out`.

    A run that was ended is continued by calling it again with the same arguments. InvalidInput, UnsupportedModel and
    CorruptCheckpoint name what is wrong before anything is computed, except for weights that are not finite numbers.
    """
    policy = policy or Policy()
    chosen, how = form(weights), METHODS.get(method)
    settings = settings or Settings()
    source = original(files)
    _refuse(source.spec, chosen, how, method, calibration)
    chosen = chosen.with_scales(source.dtype)
    by_layer = _by_layer(source)
    quantized = {
        name for names in by_layer for name in names if _is_matrix(source, name) and policy.keeps(_module(name)) is None
    }
    if not quantized:
        raise InvalidInput("the policy leaves nothing to quantize", field="weights")
    _refuse_unmatched(policy, by_layer)
    export.refuse(chosen, {name: source.shape(name) for name in sorted(quantized)})
    _refuse_other_weights(source)
    journal = Journal(out, _identity(source, chosen, method, settings, policy, calibration))
    try:
        run = _Run(source, chosen, how, settings, out, journal, calibration)
        losses = run.layers(by_layer, quantized, report)
        run.ends({name for names in by_layer for name in names})
        run.finish(policy, quantized)
    finally:
        journal.close()
    return Result(out, source.nbytes, _file_bytes(checkpoint_paths(out)), tuple(losses))


class _Run:
    def __init__(
        self,
        source: Original,
        chosen: Format,
        method: Method,
        settings: Settings,
        out: Path,
        journal: Journal,
        calibration: CalibrationText | None,
    ) -> None:
        self._source = source
        self._spec = source.spec
        self._form = chosen
        self._method = method
        self._settings = settings
        self._out = out
        self._journal = journal
        self._names: Names = MODELS.get(source.spec.model_type).hf
        self._calibration = calibration if method.calibrated else None
        self._plain: list[str] = []

    def layers(self, by_layer: list[list[str]], quantized: set[str], report: Callable[[Progress], None]) -> list[float]:
        self._plain = [_module(n) for names in by_layer for n in names if n not in quantized]
        hidden = None if self._calibration is None else self._embedded(self._calibration.tokens)
        losses = []
        for i, names in enumerate(by_layer):
            part = f"layer-{i:05d}"
            resumed = part in self._journal.done
            if resumed:
                self._check(part)
                loss = float(self._journal.done[part]["loss"])
                rounded = None
            else:
                loss, rounded = self._layer(i, names, quantized, hidden, part)
            losses.append(loss)
            if hidden is not None and i + 1 < len(by_layer):
                tensors = self._written(part, names) if rounded is None else rounded
                hidden = LayerRun(self._spec, self._names, i, tensors)(hidden)
            report(Progress(i + 1, len(by_layer), loss, resumed))
        return losses

    def _layer(
        self, i: int, names: list[str], quantized: set[str], hidden: torch.Tensor | None, part: str
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """Quantize and write a layer; its loss, and its tensors as they were rounded."""
        original = {name: torch.from_numpy(np.array(self._source.read(name))) for name in names}
        for name, tensor in original.items():
            _refuse_not_finite(name, tensor)
        matrices = tuple(name for name in names if name in quantized)
        work = LayerWork(i, self._names, dict(original), matrices, norm_offset=self._spec.norm_offset)
        if hidden is not None:
            layer = LayerRun(self._spec, self._names, i, original)
            work.inputs = layer.record()
            layer(hidden)
        packed = self._method.quantize(work, self._form, self._settings)
        rounded = {name: matrix.dequantize() for name, matrix in packed.items()}
        stored: dict[str, torch.Tensor] = {}
        for name in names:
            if name in packed:
                module = _module(name)
                stored |= {f"{module}.{k}": v for k, v in export.tensors(packed[name], self._source.dtype).items()}
            elif work.tensors[name] is original[name]:
                stored[name] = self._source.raw(name)
            else:
                stored[name] = work.tensors[name].to(self._source.raw(name).dtype)
                work.tensors[name] = stored[name].float()
        loss = _loss(work, rounded)
        self._write(part, stored, loss=loss)
        return loss, work.tensors | rounded

    def ends(self, inside: set[str]) -> None:
        """Everything outside the layers as it is."""
        if _ENDS in self._journal.done:
            self._check(_ENDS)
            return
        stored = {name: self._source.raw(name) for name in self._source.names() if name not in inside}
        for name, tensor in stored.items():
            _refuse_not_finite(name, tensor)
        self._write(_ENDS, stored)

    def finish(self, policy: Policy, quantized: set[str]) -> None:
        """Index, tokenizer and, last of all, the config, whose presence says that the folder is whole."""
        where = {}
        for part, line in self._journal.done.items():
            where |= dict.fromkeys(line["tensors"], _file(part))
        total = sum(int(line["bytes"]) for line in self._journal.done.values())
        write_atomic(self._out / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2))
        self._source.write_rest(self._out)
        linear = [n for n in self._source.names() if n not in quantized and _is_matrix(self._source, n)]
        ignored = [_module(n) for n in linear if "embed" not in n]
        if self._spec.tied_embeddings and "lm_head" not in ignored:
            ignored.append("lm_head")
        config = dict(self._source.config)
        config["quantization_config"] = export.quantization_config(self._form, ignored)
        write_atomic(self._out / "config.json", json.dumps(config, indent=2))

    def _embedded(self, tokens: np.ndarray) -> torch.Tensor:
        table = self._source.rows(f"{self._names.embedding}.weight")
        hidden = torch.from_numpy(np.array(table.read(tokens.reshape(-1)))).view(*tokens.shape, -1)
        return hidden * self._spec.embedding_scale

    def _write(self, part: str, stored: dict[str, torch.Tensor], **facts: Any) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = self._out / _file(part)
        temporary = path.with_suffix(".partial")
        try:
            save_file({k: v.contiguous() for k, v in stored.items()}, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise HeadraceError(
                f"{temporary} cannot be written: {error}",
                field=str(temporary),
                remedy="make room and repeat the command, which goes on from here",
            ) from None
        with naming(temporary), temporary.open("rb") as file:
            os.fsync(file.fileno())
            # The library lets only the owner read; the journal was made with the user's own umask.
            os.fchmod(file.fileno(), (self._out / JOURNAL).stat().st_mode & 0o777)
        os.replace(temporary, path)
        size = sum(t.nbytes for t in stored.values())
        self._journal.finish(part, tensors=sorted(stored), bytes=size, file_bytes=path.stat().st_size, **facts)

    def _check(self, part: str) -> None:
        path = self._out / _file(part)
        if not path.is_file() or path.stat().st_size != self._journal.done[part]["file_bytes"]:
            raise CorruptCheckpoint(
                f"{path.name} is not what the journal says was written",
                field=str(path),
                remedy="begin again in an empty folder",
            )

    def _written(self, part: str, names: list[str]) -> dict[str, torch.Tensor]:
        """A finished layer's tensors, dequantized."""
        from headrace.engine.weights.quantized import QuantizedSource

        raw = SafetensorsSource([self._out / _file(part)])
        config = export.quantization_config(self._form, self._plain)
        source = QuantizedSource(raw, config, self._form.spec.name)
        return {name: torch.from_numpy(np.array(source.read(name))) for name in names}


def _refuse(spec: ModelSpec, chosen: Format, how: Method, method: str, calibration: CalibrationText | None) -> None:
    if (reason := unsupported(spec)) is not None:
        raise UnsupportedModel(f"this model cannot be quantized: {reason}", field="model_type")
    sparse = any(isinstance(layer.mlp, MoE) for layer in spec.layers)
    if (reason := how.refuse(chosen, sparse=sparse)) is not None:
        raise InvalidInput(reason, field="method")
    if how.calibrated and calibration is None:
        raise InvalidInput(f"{method} needs text to calibrate with", field="calibrate", remedy="give a text file")
    if calibration is not None and int(calibration.tokens.max()) >= spec.vocab_size:
        raise InvalidInput("the calibration text has tokens beyond the vocabulary", field="calibrate")


def _refuse_unmatched(policy: Policy, by_layer: list[list[str]]) -> None:
    modules = [_module(name) for names in by_layer for name in names]
    for pattern in policy.modules:
        if not any(matches(pattern, module) for module in modules):
            raise InvalidInput(
                f"{pattern!r} names no module of this model's layers",
                field="keep",
                remedy=f"names are like {modules[0]}; re:… must match from their beginning",
            )


def _refuse_other_weights(source: Original) -> None:
    """CorruptCheckpoint if tensors are missing, of other shapes or without a place, as when the model is loaded; nothing is read."""
    spec, names = source.spec, MODELS.get(source.spec.model_type).hf
    found = Checkpoint(Outlines({name: source.shape(name) for name in source.names()}))
    for i in range(len(spec.layers)):
        outline_of_layer(spec, names, found, i)
    table = (spec.vocab_size, spec.hidden_size)
    found.take(f"{names.embedding}.weight", table)
    found.take(f"{names.final_norm}.weight", (spec.hidden_size,))
    if spec.tied_embeddings:
        found.leave(f"{names.head}.weight")
    else:
        found.take(f"{names.head}.weight", table)
    found.finish()


def _refuse_not_finite(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise CorruptCheckpoint(f"tensor {name!r} holds NaN or infinity", field=name, remedy="download it again")


def _by_layer(source: Original) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in source.spec.layers]
    for name in source.names():
        layer = layer_of(name)
        if 0 <= layer < len(found) and not name.endswith("rotary_emb.inv_freq"):
            found[layer].append(name)
    for i, names in enumerate(found):
        if not names:
            raise CorruptCheckpoint(f"layer {i} has no tensors", field=f"layers.{i}")
    return found


def _is_matrix(source: Original, name: str) -> bool:
    return name.endswith(".weight") and len(source.shape(name)) == 2


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _file(part: str) -> str:
    return f"model-{part}.safetensors"


def _loss(work: LayerWork, rounded: dict[str, torch.Tensor]) -> float:
    lost = whole = 0.0
    for name, values in rounded.items():
        weight = work.tensors[name]
        difference = values - weight
        inputs = work.inputs.get(name)
        if inputs is None or not inputs.count:
            lost, whole = lost + float(difference.square().sum()), whole + float(weight.square().sum())
        else:
            lost, whole = lost + inputs.loss(difference), whole + inputs.loss(weight)
    return lost / whole if whole else 0.0


def _identity(
    source: Original,
    chosen: Format,
    method: str,
    settings: Settings,
    policy: Policy,
    calibration: CalibrationText | None,
) -> dict[str, Any]:
    """What must be the same for a run to be continued."""
    text = "" if calibration is None else hashlib.sha256(calibration.tokens.tobytes()).hexdigest()[:16]
    return {
        "model": source.identity(),
        "weights": chosen.name,
        "method": method,
        "calibrate": text,
        "settings": asdict(settings),
        "kept": [sorted(policy.parts), list(policy.modules)],
    }


def _file_bytes(paths: tuple[Path, ...]) -> int:
    return sum(path.stat().st_size for path in paths)


__all__ = ["CalibrationText", "Progress", "Result", "Settings", "quantize"]
