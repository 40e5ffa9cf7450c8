"""The native CPU backend without torch: weights packed for `headrace_native`, one call per step, sampling in C++."""
