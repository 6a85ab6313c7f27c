"""Run the real step of a config on the GPU, in a separate process, and return what the allocators held.

As a program (`python -m memory.ladder.measured_step`), it reads one JSON request from standard input and prints the
answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from memory.predict.prediction import Stage
from settings import Settings

TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class MeasuredStep:
    """The peaks of torch's allocators: memory of the GPU in use and reserved, and pinned memory of the host."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    host_bytes: int


def measure_in_process(settings: Settings, stage: Stage) -> MeasuredStep | None:
    """Return the peaks of two real steps; None if they fail, for example because they do not fit."""
    request = json.dumps({"stage": stage, "settings": settings.model_dump(mode="json")})
    done = subprocess.run(
        [sys.executable, "-m", "memory.ladder.measured_step"],
        cwd=Path(__file__).resolve().parents[2],
        input=request,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        return None
    return MeasuredStep(**json.loads(done.stdout.splitlines()[-1]))


def measure_step(settings: Settings, stage: Stage) -> MeasuredStep:
    """Run two updates on zeros on the GPU, the second with optimizer states, and return the peaks."""
    import torch

    from memory.predict.step import build_step, fullest_step

    device = torch.device("cuda")
    step = build_step(settings, stage, device)
    training = settings.training_of(stage)
    batches = [step.example_batch(training.batch_size)] * min(2, training.gradient_accumulation_steps)
    first = fullest_step(settings, stage)
    for number in (first, first + 1):
        step(batches, number)
    torch.cuda.synchronize()
    host = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    return MeasuredStep(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device), host)


def main() -> None:
    """Answer the request on standard input."""
    import os

    from runtime import cublas

    request = json.loads(sys.stdin.read())
    settings = Settings.model_validate(request["settings"])
    if settings.device.allocator:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings.device.allocator
    cublas.limit_workspaces()
    print(json.dumps(asdict(measure_step(settings, request["stage"]))))


if __name__ == "__main__":
    main()
