"""Validation during training: held-out reconstructions and losses, skill, previews and the metrics behind them."""
