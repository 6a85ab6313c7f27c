"""Runs a training script that stops at two moments, so that a test can cut the network or take a machine away.

python train_on_two_hosts.py SCRIPT ARGUMENT ...

At step 4 of two ranks, before the gradients are averaged for the first time, rank 1 creates `inside_step` and waits
until `go_on` exists. A rank that trains alone waits in step 6 until torchrun stops it, because the other host is back.
"""

import runpy
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from runtime import processes
from training.step import TrainingStep

TIMEOUT_SECONDS = 30


def wait_for_stop() -> None:
    """Wait for SIGTERM and let the loop, which counts on it, see it too."""
    received: list[int] = []
    handler = signal.getsignal(signal.SIGTERM)
    assert callable(handler), "the training loop handles the signal"

    def receive(number, frame):
        received.append(number)
        handler(number, frame)

    signal.signal(signal.SIGTERM, receive)
    while not received:
        time.sleep(0.02)
    signal.signal(signal.SIGTERM, handler)


def stop_inside_steps() -> None:
    accumulate = TrainingStep.accumulate
    inside, go_on = Path("inside_step"), Path("go_on")

    def stopping(self, micro_batches, step, run):
        world_size, rank = self.process.world_size, self.process.rank
        if world_size == 2 and rank == 1 and step == 4 and not go_on.exists():
            inside.touch()
            while not go_on.exists():
                time.sleep(0.02)
        if world_size == 1 and step == 6:
            wait_for_stop()
        return accumulate(self, micro_batches, step, run)

    TrainingStep.accumulate = stopping  # type: ignore[method-assign]


if __name__ == "__main__":
    processes.STEP_TIMEOUT = timedelta(seconds=TIMEOUT_SECONDS)
    stop_inside_steps()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
