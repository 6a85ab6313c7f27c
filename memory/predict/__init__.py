"""Predict peak memory by running the real training step on fake tensors, in a process of its own.

Called by the ladder, the watch, the benchmarks and `scripts/estimate_memory.py`. Importing this package does not import
torch.
"""

from memory.predict.prediction import Prediction, PredictionError, Predictor, tier_of

__all__ = ["Prediction", "PredictionError", "Predictor", "tier_of"]
