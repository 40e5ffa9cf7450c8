"""Quantized weights: formats, readers of quantized checkpoints, methods that make them."""
