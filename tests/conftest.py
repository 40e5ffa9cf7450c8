"""Fixtures that several rooms share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace import LLM


@pytest.fixture(scope="session")
def smollm() -> Iterator[LLM]:
    """The real small model in this process, with room for dozens of requests; its prefix cache lives as long."""
    with LLM("smollm2-135m", backend="torch", threads=1, max_model_len=768, kv_bytes=256 * 2**20) as llm:
        yield llm
