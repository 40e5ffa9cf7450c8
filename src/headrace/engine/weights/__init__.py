"""Reading weights: one file per format, all behind `TensorSource`; `Checkpoint` checks what a model takes from one."""
