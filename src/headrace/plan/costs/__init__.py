"""Cost models: seconds of one engine step. One file each; `roofline` is the calibrated one."""
