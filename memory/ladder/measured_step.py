"""Run the real step of a config on the GPU, in a separate process, and return what the allocator reserved.

As a program (`python -m memory.ladder.measured_step`), it reads one JSON request from standard input and prints the
bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from memory.predict.prediction import Stage
from settings import Settings

TIMEOUT_SECONDS = 600


def measure_in_process(settings: Settings, stage: Stage) -> int | None:
    """Return the peak of two real steps in bytes; None if they fail, for example because they do not fit."""
    done = subprocess.run(
        [sys.executable, "-m", "memory.ladder.measured_step"],
        cwd=Path(__file__).resolve().parents[2],
        input=json.dumps({"stage": stage, "settings": settings.model_dump(mode="json")}),
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    return int(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def main() -> None:
    """Make two updates on zeros on the GPU, the second with optimizer states, and print the peak."""
    from runtime.precision import limit_cublas

    request = json.loads(sys.stdin.read())
    settings, stage = Settings.model_validate(request["settings"]), request["stage"]
    if settings.device.allocator:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings.device.allocator
    limit_cublas()
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
    print(torch.cuda.max_memory_reserved(device))


if __name__ == "__main__":
    main()
