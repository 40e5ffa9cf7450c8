"""NVIDIA Dynamo on one host: a frontend and a vLLM worker that find each other through files."""

from headrace.bench.targets import EngineTarget

TARGET = EngineTarget("dynamo")
