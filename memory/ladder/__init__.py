"""The ladder: which changes to a config lower its memory, in which order, and which one to take.

`scripts/oom_ladder.py` walks it; the watch asks it for the next rung. Importing this package does not import torch.
"""
