"""What a run says while it trains: the progress bar, metrics, the time left, waiting for data, and trackers."""
