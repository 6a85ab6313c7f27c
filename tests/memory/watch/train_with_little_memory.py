"""Runs a training script whose first step may take what it likes and whose later steps get a share of that memory.

python train_with_little_memory.py DIVISOR SCRIPT ARGUMENT ...

The share refers to what the step really took, so that neither the kernels nor the allocator of a machine decide whether
it is enough. Beyond it, allocations fail for real.
"""

import resource
import runpy
import sys
from pathlib import Path

import psutil

from training.step import TrainingStep

MIB = 1 << 20


def address_space_peak() -> int:
    """Return the most bytes that this process has ever mapped."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmPeak"].split()[0]) << 10


def limit_after_first_step(divisor: float) -> None:
    accumulate = TrainingStep.accumulate
    taken = limit = None

    def limited(self, micro_batches, step, run):
        nonlocal taken, limit
        before = psutil.Process().memory_info().vms
        if taken is not None:
            limit = limit or before + int(taken / divisor)
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            try:
                return accumulate(self, micro_batches, step, run)
            finally:
                # Validation loads libraries, whose size has nothing to do with a step's.
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        peak_before = address_space_peak()
        result = accumulate(self, micro_batches, step, run)
        taken = address_space_peak() - before
        assert before + taken > peak_before, "something before the step mapped more than the step"
        print(f"the first step took {taken // MIB} MiB", file=sys.stderr)
        return result

    TrainingStep.accumulate = limited  # type: ignore[method-assign]


if __name__ == "__main__":
    _, divisor, script, *arguments = sys.argv
    limit_after_first_step(float(divisor))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
