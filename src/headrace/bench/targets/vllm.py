"""vLLM."""

from headrace.bench.targets import EngineTarget

TARGET = EngineTarget("vllm")
