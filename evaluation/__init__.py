"""Quality of a run: validation during training; metrics, samples and previews of a trained run."""
