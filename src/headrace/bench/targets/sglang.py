"""SGLang."""

from headrace.bench.targets import EngineTarget

TARGET = EngineTarget("sglang")
