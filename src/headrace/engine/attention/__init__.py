"""Attention backends: a file is a registration (`BACKEND`); all equal `naive` on whatever they claim."""

from headrace.base.registry import Registry

ATTENTION = Registry(__name__, "BACKEND", kind="attention")
