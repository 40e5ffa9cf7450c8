"""The naive loop of `engine.naive`: one request after another, batch 1, with or without a KV cache."""

from headrace.bench.targets import EngineTarget

TARGET = EngineTarget("naive")
