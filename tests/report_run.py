"""A run folder with everything that a report reads, made without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from dev.tiny_config import TINY
from evaluation.previews import ViewerVolume, save_viewer_volumes
from memory.watch.run_record import ladder_position
from settings import Settings, dump_yaml
from storage.run_folder import RunFolder

PREDICTION = {
    "peak_allocated_bytes": 900 << 20,
    "peak_reserved_bytes": 1 << 30,
    "required_bytes": 3 << 29,
    "host_bytes": 0,
    "phase": "generator backward",
    "margin": 0.2,
    "breakdown": {"activations": 800 << 20, "parameters": 60 << 20, "optimizer": 40 << 20},
}


def volume_with_gradient(grid: tuple[int, int, int]) -> torch.Tensor:
    """A volume in [-1, 1] whose slices all differ, along each axis."""
    axes = torch.meshgrid(*(torch.linspace(0, 1, axis) for axis in grid), indexing="ij")
    return ((axes[0] + 2 * axes[1] + 4 * axes[2]) / 7 * 2 - 1)[None]


def make_run(folder: Path, name: str = "tiny", num_lines: int = 30, with_volumes: bool = True, **changes: Any) -> Path:
    """A run folder as training leaves it, without training."""
    settings = Settings.model_validate({**TINY, "name": name, **changes})
    run = RunFolder(folder / name)
    run.path.mkdir(parents=True)
    run.config.write_text(dump_yaml(settings))
    preset = folder / "preset.yaml"
    preset.write_text(yaml.safe_dump({**TINY, "seed": 8}))
    command = ["train_autoencoder.py", "--config", str(preset)]
    run.environment.write_text(json.dumps({"device": "cpu", "command": command, "packages": {"torch": "2"}}))
    with run.metrics.open("w") as lines:
        for step in range(1, num_lines + 1):
            memory = {"memory_allocated_gib": 0.4, "memory_peak_gib": 0.8}
            line = {"stage": "autoencoder", "step": step, "reconstruction": 1 / step, "kl": 2.0, **memory}
            lines.write(json.dumps(line) + "\n")
            if step % 10 == 0:
                lines.write(json.dumps({"stage": "autoencoder", "step": step, "val_psnr": 20 + step / 10}) + "\n")
        lines.write(json.dumps({"stage": "ldm", "step": 5, "diffusion": 0.5, "memory_peak_gib": 0.2}) + "\n")
    if with_volumes:
        image = volume_with_gradient((16, 20, 24))
        for step in (10, 20):
            pair = {"input": ViewerVolume.of(image), "reconstruction": ViewerVolume.of(image * (1 - 1 / step))}
            save_viewer_volumes(run, "autoencoder", step, pair)
        save_viewer_volumes(run, "ldm", 5, {f"sample_{i}": ViewerVolume.of(image.flip(i + 1)) for i in range(3)})
    record = {"prediction": PREDICTION, "ladder": ladder_position(settings, "autoencoder")}
    (run.path / "memory_autoencoder.json").write_text(json.dumps(record))
    return run.path
