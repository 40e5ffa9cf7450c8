"""The torch-free control plane: requests, blocks, radix prefix tree, scheduler, step plans, messages."""
