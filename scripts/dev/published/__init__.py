"""Figures that others read from real GPUs, and the networks behind them, for docs/prediction.md."""
