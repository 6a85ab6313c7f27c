"""The training steps and their mechanics: precision, averaging, checkpoints, the run folder, logging, distribution."""
