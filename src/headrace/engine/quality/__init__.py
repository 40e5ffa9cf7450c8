"""What a number format costs in quality: its answers and probabilities beside those of the unquantized model.

`headrace.engine.quality.measure` runs it all; the other modules hold one measure each.
"""
