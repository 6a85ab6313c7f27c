"""Runs a training script in which memory runs out in one of its processes at the third step.

python train_without_memory.py RANK SCRIPT ARGUMENT ...
"""

import os
import runpy
import sys

from training.step import TrainingStep


def fail_in(rank: str) -> None:
    accumulate = TrainingStep.accumulate

    def failing(self, micro_batches, step, run):
        if step == 2 and os.environ["RANK"] == rank:
            raise MemoryError
        return accumulate(self, micro_batches, step, run)

    TrainingStep.accumulate = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    _, rank, script, *arguments = sys.argv
    fail_in(rank)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
