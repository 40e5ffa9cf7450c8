"""Runs step plans: loop, process and executors. Only the torch executor imports torch."""
