"""Headrace's own server."""

from headrace.bench.targets import EngineTarget

TARGET = EngineTarget("headrace")
