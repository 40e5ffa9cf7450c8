"""The blocks that models are built from. Each takes what it uses; what a step knows comes in a `StepContext`."""
