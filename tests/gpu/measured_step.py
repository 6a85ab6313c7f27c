"""Train a few steps of one config on the GPU and print their peaks and times as JSON.

python -m tests.gpu.measured_step CONFIG STAGE [section.key=value ...]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memory.predict.step import build_step, fullest_step
from runtime.processes import processes
from settings import load_settings

TIMED_STEPS = 5


def measure(config: str, stage: Any, overrides: list[str]) -> dict[str, Any]:
    """Return the peaks of two full updates, and the median seconds of later ones.

    The second update has optimizer states and, with accumulation, gradients of earlier micro-batches.
    """
    settings = load_settings(Path(config), [*overrides, "device.type=cuda"], stage=stage)
    with processes(settings) as process:
        step = build_step(settings, stage, process.device)
        first, training = fullest_step(settings, stage), step.training
        example = step.example_batch(training.batch_size).pin_memory()
        per_step = training.gradient_accumulation_steps

        def update(number: int) -> float:
            micro_batches = []
            for micro_batch in range(per_step):
                start = (number * per_step + micro_batch) * training.batch_size
                micro_batches.append(replace(example, positions=tuple(range(start, start + training.batch_size))))
            torch.cuda.synchronize()
            start_time = time.perf_counter()
            step(micro_batches, number)
            torch.cuda.synchronize()
            return time.perf_counter() - start_time

        for number in (first, first + 1):
            update(number)
        found = {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "seconds": statistics.median(update(first + 2 + number) for number in range(TIMED_STEPS)),
            "precision": step.precision.name,
        }
        step.guard.raise_if_bad()
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], sys.argv[3:])))
