"""Train a few updates of one config on the GPU, in a process of its own, and print peaks, times and kernels as JSON.

As a program (`python -m evaluation.gpu_step`) it reads one JSON request from standard input.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

MOST_UPDATES = 5
TOP = 20


def measured(settings: Any, stage: Any, seconds: float) -> dict[str, Any]:
    """Return what updates of a stage take; as many as fit into `seconds` are timed, at least one."""
    import torch

    from memory.predict.step import build_step, fullest_step
    from runtime.processes import processes

    start = time.perf_counter()
    with processes(settings) as process:
        device = process.device
        step = build_step(settings, stage, device)
        first, training = fullest_step(settings, stage), step.training
        example, per_step = step.example_batch(training.batch_size), training.gradient_accumulation_steps
        example = example.pin_memory() if device.type == "cuda" else example

        def finish() -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        def update(number: int) -> tuple[float, float]:
            micro_batches = []
            for micro_batch in range(per_step):
                begin = (number * per_step + micro_batch) * training.batch_size
                micro_batches.append(replace(example, positions=tuple(range(begin, begin + training.batch_size))))
            finish()
            wall, cpu = time.perf_counter(), time.process_time()
            step(micro_batches, number)
            cpu = time.process_time() - cpu  # before the wait, in which the host may spin
            finish()
            return time.perf_counter() - wall, cpu

        def peaks(prefix: str) -> dict[str, int]:
            if device.type != "cuda":
                return {}
            found = {
                f"{prefix}peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
                f"{prefix}peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
            }
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            return found

        update(first)
        result: dict[str, Any] = peaks("first_")
        update(first + 1)  # with the states of the optimizer
        times = [update(first + 2)]
        while len(times) < MOST_UPDATES and time.perf_counter() - start < seconds:
            times.append(update(first + 2 + len(times)))
        result |= peaks("")
        result |= {
            "seconds": statistics.median(wall for wall, _ in times),
            "host_cpu_seconds": statistics.median(cpu for _, cpu in times),
            "updates": len(times),
            "precision": step.precision.name,
        }
        with torch.profiler.profile() as profiler:
            update(first + 2 + len(times))
        # Operators of the host repeat the time of the kernels that they launch.
        kernels = [event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
        rows = sorted(((k.self_device_time_total / 1e6, k.count, k.key) for k in kernels), reverse=True)
        result["device_seconds"] = sum(row[0] for row in rows) or None
        result["profile"] = [{"name": key, "calls": count, "device_seconds": took} for took, count, key in rows[:TOP]]
    return result


if __name__ == "__main__":
    from settings import Settings

    request = json.loads(sys.stdin.read())
    print(json.dumps(measured(Settings.model_validate(request["settings"]), request["stage"], request["seconds"])))
