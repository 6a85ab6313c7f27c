"""Weights from and for other programs: names and shapes in MONAI, MAISI and MONAI Generative."""
