"""Prediction of peak memory without a GPU, the ladder towards a budget, and what to say when memory runs out."""
