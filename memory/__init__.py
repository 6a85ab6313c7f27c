"""Prediction of peak memory without a GPU, the ladder towards a budget, and what to say when memory runs out.

What is imported here needs no torch: the work is done in `memory.predict_process`.
"""

from memory.prediction import Prediction, PredictionError, Predictor, predict, tier_of

__all__ = ["Prediction", "PredictionError", "Predictor", "predict", "tier_of"]
