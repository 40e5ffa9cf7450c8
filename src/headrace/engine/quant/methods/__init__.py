"""Ways to quantize a layer's matrices: a file here is a registration and exports `METHOD`."""

from headrace.base.registry import Registry

METHODS = Registry(__name__, "METHOD", kind="method")
