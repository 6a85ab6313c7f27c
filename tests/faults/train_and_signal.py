"""Runs a training script that sends itself a signal at a given moment, so that tests need no timing.

python train_and_signal.py SIGNAL MOMENT SCRIPT ARGUMENT ...

MOMENT is the number of the step that it begins, counted from 0, or `save`: while it writes its second checkpoint. Of
several processes the one of rank 1 gets the signal, and only before torchrun restarts them. Instead of getting a signal
it may run out of memory: MemoryError.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

import training.checkpoints
from training.step import TrainingStep


def signal_at_step(name: str, chosen: int) -> None:
    accumulate = TrainingStep.accumulate
    is_meant = os.environ.get("RANK", "1") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def signalled(self, micro_batches, step, run):
        if step == chosen and is_meant:
            if name == "MemoryError":
                raise MemoryError
            os.kill(os.getpid(), signal.Signals[name])
        return accumulate(self, micro_batches, step, run)

    TrainingStep.accumulate = signalled  # type: ignore[method-assign]


def signal_at_second_save(number: int) -> None:
    put_in_place = training.checkpoints.put_in_place
    saves = 0

    def signalled(temporary: Path, path: Path) -> None:
        nonlocal saves
        saves += 1
        if saves == 2:
            os.kill(os.getpid(), number)
        put_in_place(temporary, path)

    training.checkpoints.put_in_place = signalled


if __name__ == "__main__":
    _, name, moment, script, *arguments = sys.argv
    if moment == "save":
        signal_at_second_save(signal.Signals[name])
    else:
        signal_at_step(name, int(moment))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
