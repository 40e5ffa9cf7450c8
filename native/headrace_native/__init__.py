"""The native CPU backend of Headrace: quantized matrix products, paged attention and whole transformer steps in C++."""

from headrace_native._native import (
    Matrix,
    Model,
    Pool,
    checksum,
    gemm,
    kernels,
    logprobs,
    natural_format,
    pack,
    packed_bytes,
    populate,
    rms_norm,
    rotate_and_store,
    sample,
)

INTERFACE = 2
"""Raised when a function or an argument is added, changed or removed, with the number that the engine asks for."""

__all__ = [
    "INTERFACE",
    "Matrix",
    "Model",
    "Pool",
    "checksum",
    "gemm",
    "kernels",
    "logprobs",
    "natural_format",
    "pack",
    "packed_bytes",
    "populate",
    "rms_norm",
    "rotate_and_store",
    "sample",
]
