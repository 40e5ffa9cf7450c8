"""transformers serve."""

from headrace.bench.targets import EngineTarget

TARGET = EngineTarget("transformers")
