"""The CUDA backend: weights on the device, the decoder's launches, captured graphs, sampling, and the steps around them."""
