"""Real CPU steps, and by how much each made the resident memory of its process grow, beside what was predicted.

As a program it reads a JSON list of variants from standard input and prints one line of JSON for each.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from memory.predict.prediction import fullest_step
from settings import Settings

ROOT = Path(__file__).resolve().parents[3]
TRAINING = "autoencoder.training"
_COMMON = {
    "device.type": "cpu",
    "device.mixed_precision": False,
    "autoencoder.num_channels": (16, 32),
    "autoencoder.num_res_blocks": 1,
    "autoencoder.attention_levels": (False, False),
    "autoencoder.norm_num_groups": 8,
    f"{TRAINING}.gradient_accumulation_steps": 1,
    f"{TRAINING}.use_perceptual_loss": False,
    f"{TRAINING}.discriminator.num_layers_d": 2,
    f"{TRAINING}.discriminator.num_channels": 16,
    f"{TRAINING}.use_gradient_checkpointing": False,
}
_CHECKPOINTED = {f"{TRAINING}.use_gradient_checkpointing": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "stock": {"autoencoder.implementation": "monai"},
    "plain": {},
    "checkpointed": _CHECKPOINTED,
    "offload": {**_CHECKPOINTED, f"{TRAINING}.use_gradient_checkpointing_offload": True},
    "slabs": {**_CHECKPOINTED, f"{TRAINING}.slab_rows": 16},
}
# Released blocks go back to the system, so that the peak is what the step holds and not what the heap keeps.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_TRIM_THRESHOLD_": str(1 << 18), "MALLOC_TOP_PAD_": "0"}


def settings_of(name: str, grid: tuple[int, int, int], batch: int = 1) -> Settings:
    """Return the settings of a variant."""
    changes = {"data.voxel_size": grid, f"{TRAINING}.batch_size": batch}
    return Settings().with_overrides({**_COMMON, **changes, **VARIANTS[name]})


def measure(requests: list[tuple[str, tuple[int, int, int], int]]) -> list[dict[str, Any]]:
    """Return, for each variant, grid and batch, the growth of the process beside its prediction, in bytes."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.memory.predict.resident"],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        input=json.dumps(requests),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    """Answer the request on standard input."""
    import torch

    from memory.predict.step import predict_step

    torch.set_num_threads(1)
    requests = [(name, tuple(grid), batch) for name, grid, batch in json.load(sys.stdin)]
    for name in dict.fromkeys(name for name, *_ in requests):  # libraries load their code at the first step
        _run(settings_of(name, (16, 16, 16)))
    grown = [_growth(settings_of(*request)) for request in requests]
    for request, measured in zip(requests, grown, strict=True):
        prediction = predict_step(settings_of(*request), "autoencoder", whole_run=False)
        row = {"batch": request[2], "tier": prediction.tier}
        print(json.dumps(row | {"grown": measured, "predicted": prediction.peak_allocated_bytes}))


def _growth(settings: Settings) -> int:
    import psutil

    from memory.watch.memory_watch import reset_resident_peak, resident_peak_bytes

    gc.collect()
    before = psutil.Process().memory_info().rss
    assert reset_resident_peak(), "this system cannot reset the peak of the resident memory"
    _run(settings)
    return resident_peak_bytes() - before


def _run(settings: Settings) -> None:
    """Run an update with optimizer states and every loss term."""
    from memory.predict.step import build_step, make_optimizer_state

    step = build_step(settings, "autoencoder")
    for updater in step.updaters.values():
        make_optimizer_state(updater)
    step([step.example_batch(settings.autoencoder.training.batch_size)], fullest_step(settings, "autoencoder"))


if __name__ == "__main__":
    main()
