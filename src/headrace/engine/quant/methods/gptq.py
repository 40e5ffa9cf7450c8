"""GPTQ (arXiv:2210.17323): columns are rounded one after the other, and what each loses is made up for by those still to come.

The error of an output is the error of its row, weighed by the inputs' gram matrix H. Having rounded column j, the best change
of the others is -e_j / U_jj · U_j,: with U the upper Cholesky factor of H⁻¹. With `act_order` the columns with the largest
activations come first, while they can still be made up for; groups keep their inputs, so nothing is reordered in the file.
"""

from __future__ import annotations

import torch

from headrace.base.errors import HeadraceError
from headrace.engine.quant.formats import Format, Packed
from headrace.engine.quant.formats._groups import grouped
from headrace.engine.quant.formats.integer_groups import IntegerGroups
from headrace.engine.quant.methods._contract import Inputs, LayerWork, Settings

_BLOCK = 128
_TRIES = 4


class GPTQ:
    calibrated = True

    def refuse(self, form: Format, *, sparse: bool) -> str | None:
        if not isinstance(form, IntegerGroups) or form.ordered:
            return f"gptq rounds to integers with scales per group or row, not to {form.name}"
        return None

    def quantize(self, work: LayerWork, form: Format, settings: Settings) -> dict[str, Packed]:
        assert isinstance(form, IntegerGroups)
        return {name: rounded(work.tensors[name], work.inputs[name], form, settings, name) for name in work.matrices}


def rounded(weight: torch.Tensor, inputs: Inputs, form: IntegerGroups, settings: Settings, name: str) -> Packed:
    """A matrix [out, in] in `form`, its columns rounded in the light of `inputs`."""
    checked = form.quantize(weight, name)  # refuses NaN, and scales beyond the format's
    columns = weight.shape[1]
    size = form.size(columns)
    weight = weight.clone()
    hessian = inputs.gram.double()
    unused = hessian.diagonal() == 0
    hessian.diagonal()[unused] = 1
    order = hessian.diagonal().argsort(descending=True) if settings.act_order else torch.arange(columns)
    scales, zeros = form.grid(grouped(weight, size))
    weight[:, unused] = 0
    factor = _factor(hessian[order][:, order], settings.damping, name).float()
    weight, group_of = weight[:, order], order // size
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    for begin in range(0, columns, _BLOCK):
        end = min(begin + _BLOCK, columns)
        errors = torch.empty(len(weight), end - begin)
        for j in range(begin, end):
            g = int(group_of[j])
            if not settings.act_order and j % size == 0:
                # The group's columns have been changed by those before: a grid for what they are now.
                _regrid(weight[:, j : j + size], form, scales, zeros, g)
            column = weight[:, j]
            codes[:, j] = form.codes(column[:, None], scales[:, g], zeros[:, g])[:, 0]
            value = (codes[:, j].float() - zeros[:, g]) * scales[:, g]
            error = (column - value) / factor[j, j]
            errors[:, j - begin] = error
            weight[:, j + 1 : end].addr_(error, factor[j, j + 1 : end], alpha=-1)
        weight[:, end:].addmm_(errors, factor[begin:end, end:], alpha=-1)
    found = torch.empty_like(codes)
    found[:, order] = codes
    return Packed(form, checked.shape, form.tensors(found, scales, zeros, None))


def _regrid(part: torch.Tensor, form: IntegerGroups, scales: torch.Tensor, zeros: torch.Tensor, g: int) -> None:
    scale, zero = form.grid(part[:, None])
    scales[:, g], zeros[:, g] = scale[:, 0], zero[:, 0]


def _factor(hessian: torch.Tensor, damping: float, name: str) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of the damped Hessian; damped more if it is singular to rounding."""
    mean = float(hessian.diagonal().mean())
    for attempt in range(_TRIES):
        damped = hessian.clone()
        damped.diagonal().add_(damping * 10**attempt * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
    raise HeadraceError(
        f"the inputs of tensor {name!r} leave its Hessian singular",
        field=name,
        remedy="calibrate with more or other text, or damp more",
    )


METHOD = GPTQ()
