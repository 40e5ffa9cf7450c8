"""GPU kernels in Triton, one family a file. Each is compared with a naive reference in higher precision by its test."""
