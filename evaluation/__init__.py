"""What a run is worth: validation while it trains, and metrics, samples and previews of a trained run."""
