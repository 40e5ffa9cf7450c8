"""Fixtures that several rooms share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from headrace import LLM

BACKEND = os.environ.get("HEADRACE_TEST_BACKEND", "torch")
"""Which backend the tests on the real model use, where they do not say."""


@pytest.fixture(scope="session")
def smollm() -> Iterator[LLM]:
    """The real small model in this process, with room for dozens of requests; its prefix cache lives as long."""
    with LLM("smollm2-135m", backend=BACKEND, threads=1, max_model_len=768, kv_bytes=256 * 2**20) as llm:
        yield llm
