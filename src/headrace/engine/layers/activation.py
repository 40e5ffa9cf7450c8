"""Activation functions by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from headrace.base.errors import UnsupportedModel
from headrace.spec.model import Activation

Activate = Callable[[torch.Tensor], torch.Tensor]

_ACTIVATIONS: dict[str, Activate] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
}


def activation(name: Activation) -> Activate:
    """The function called `name`; UnsupportedModel for one that no supported model uses."""
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} is not supported", field="hidden_act")
    return _ACTIVATIONS[name]
