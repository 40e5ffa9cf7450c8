"""Fixtures that several rooms share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

import near_ties
from headrace import LLM

# A test that fails where the machine is busy tells nothing: Hypothesis would time every example by default.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

BACKEND = os.environ.get("HEADRACE_TEST_BACKEND", "torch")
"""Which backend the tests on the real model use, where they do not say."""


@pytest.fixture(scope="session")
def smollm() -> Iterator[LLM]:
    """The real small model in this process, with room for dozens of requests; its prefix cache lives as long."""
    with LLM("smollm2-135m", backend=BACKEND, threads=1, max_model_len=768, kv_bytes=256 * 2**20) as llm:
        yield llm


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the near-ties at which greedy answers of the real model parted."""
    terminalreporter.section(
        f"greedy answers parted at {len(near_ties.LISTED)} near-ties (two best within {near_ties.TIE})"
    )
    for line in near_ties.summary():
        terminalreporter.write_line(line)
