"""Weights from elsewhere and for elsewhere: names and shapes of MONAI's, MAISI's and MONAI Generative's networks."""
