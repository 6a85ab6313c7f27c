"""The ladder: which changes to a config lower its memory, in which order to try them, and which one to take.

Called by `scripts/oom_ladder.py`, which walks it, and by the watch, which takes the next rung when memory runs out.
Importing this package does not import torch.
"""
