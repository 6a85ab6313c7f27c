"""What really happens: the train scripts' watch over memory, from the first prediction to an out-of-memory report."""

from memory.watch.memory_watch import MemoryWatch, train_with_rungs

__all__ = ["MemoryWatch", "train_with_rungs"]
