"""Memory of a real run: announce the prediction, log readings, and report or survive running out of memory.

Called by the train scripts; `scripts/` also reads its calibration and writes its records.
"""

from memory.watch.memory_watch import MemoryWatch, train_with_rungs

__all__ = ["MemoryWatch", "train_with_rungs"]
