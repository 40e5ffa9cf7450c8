"""The native CPU backend of Headrace: quantized matrix products, paged attention and whole transformer steps in C++."""

from headrace_native._native import Matrix, Model, Pool, gemm, kernels, natural_format, pack, packed_bytes

__all__ = ["Matrix", "Model", "Pool", "gemm", "kernels", "natural_format", "pack", "packed_bytes"]
