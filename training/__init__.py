"""The training loop, the steps of both stages, optimization, checkpoints, resuming and logging."""
