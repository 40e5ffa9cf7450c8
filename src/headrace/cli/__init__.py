"""The `headrace` command: one file per verb; wires the packages together."""
