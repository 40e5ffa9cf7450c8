"""Executors of step plans, one backend per file; each exports `BACKEND`."""
