"""Architectures: a file named after its Hugging Face `model_type` is a registration (`MODEL`).

Geometry comes from the `ModelSpec`, blocks from `engine.layers.decoder`; a file says what is left: the tensors' names.
"""

from headrace.base.registry import Registry

MODELS = Registry(__name__, "MODEL", kind="model_type")
