"""The `headrace` command: one file per verb; wires the rooms together."""
