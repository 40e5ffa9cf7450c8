"""Policies of the scheduler, one file each: a file under `order`, `eviction` or `admission` is a registration."""

from __future__ import annotations

from headrace.base.registry import Registry

ORDER = Registry("headrace.control.policies.order", "POLICY", kind="order")
EVICTION = Registry("headrace.control.policies.eviction", "POLICY", kind="eviction")
ADMISSION = Registry("headrace.control.policies.admission", "POLICY", kind="admission")
