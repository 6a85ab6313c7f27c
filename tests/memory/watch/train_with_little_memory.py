"""Runs a training script whose address space is limited from its second step on; the allocations then fail for real.

python train_with_little_memory.py MEBIBYTES SCRIPT ARGUMENT ...
"""

import resource
import runpy
import sys

import psutil

from training.step import TrainingStep


def limit_from_step(number: int, mebibytes: int) -> None:
    accumulate = TrainingStep.accumulate

    def limited(self, micro_batches, step, run):
        if step >= number and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
            now = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (now + (mebibytes << 20), resource.RLIM_INFINITY))
        return accumulate(self, micro_batches, step, run)

    TrainingStep.accumulate = limited  # type: ignore[method-assign]


if __name__ == "__main__":
    _, mebibytes, script, *arguments = sys.argv
    limit_from_step(1, int(mebibytes))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
