"""What a run says while it trains: the progress bar, metrics, the time left and waiting for data."""
