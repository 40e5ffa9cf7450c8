"""Facts and arithmetic: model geometry, precision, hardware, cache layout, accounting. Imports no torch."""
