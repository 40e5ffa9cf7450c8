"""Lengths and arrivals of a chat service, November 2023 (Azure LLM inference trace)."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.bench.traffic import Session, TrafficContext, WorkloadKind
from headrace.bench.workloads._azure import Options, replay


def sessions(_options: Options, context: TrafficContext) -> Iterator[Session]:
    return replay("azure_conv_2023", context)


WORKLOAD = WorkloadKind("real lengths and arrivals of a chat service", Options, sessions, has_arrivals=True)
