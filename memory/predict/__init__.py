"""Predict peak memory by running the real training step on fake tensors, in a process of its own.

The ladder, the watch and the scripts call it. Importing this package does not import torch.
"""

from memory.predict.prediction import Prediction, PredictionError, Predictor, predict, tier_of

__all__ = ["Prediction", "PredictionError", "Predictor", "predict", "tier_of"]
