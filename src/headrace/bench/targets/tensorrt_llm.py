"""TensorRT-LLM."""

from headrace.bench.targets import EngineTarget

TARGET = EngineTarget("tensorrt-llm")
