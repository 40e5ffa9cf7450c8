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

__all__ = [
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
