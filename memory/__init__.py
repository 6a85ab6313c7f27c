"""Memory of a training step: `predict` it, find changes that lower it on the `ladder`, and `watch` it in a real run."""
