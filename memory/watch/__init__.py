"""Memory of a real run: announce the prediction, log readings, and report or survive running out of memory.

Called by the train scripts; `scripts/` also reads its calibration and writes its records. Importing this package does
not import torch.
"""
