"""Readers of quantized checkpoints: a file named after its `quant_method` is a registration and exports `READER`.

Torch-free. A reader knows which tensors of a safetensors checkpoint make up one matrix and how their bits are ordered.
"""

from headrace.base.registry import Registry

READERS = Registry(__name__, "READER", kind="quant_method")
