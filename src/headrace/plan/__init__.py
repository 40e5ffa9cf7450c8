"""The capacity planner: memory, latency, throughput and dollars before renting a GPU. Imports no torch."""
