"""A run folder with everything that a report reads, made without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from runtime.files import RunFolder
from settings import Settings, dump_yaml
from tests.support.tiny_config import TINY
from training.validation.previews import ViewerVolume, save_viewer_volumes

PREDICTION = {
    "peak_allocated_bytes": 900 << 20,
    "peak_reserved_bytes": 1 << 30,
    "required_bytes": 3 << 29,
    "host_bytes": 0,
    "phase": "generator backward",
    "margin": 0.2,
    "breakdown": {"activations": 800 << 20, "parameters": 60 << 20, "optimizer": 40 << 20},
}
SPACING = (1.0, 1.0, 1.0)


def volume_with_gradient(grid: tuple[int, int, int]) -> torch.Tensor:
    """A volume in [-1, 1] whose slices all differ, along each axis."""
    axes = torch.meshgrid(*(torch.linspace(0, 1, axis) for axis in grid), indexing="ij")
    return ((axes[0] + 2 * axes[1] + 4 * axes[2]) / 7 * 2 - 1)[None]


def make_run(
    folder: Path,
    name: str = "tiny",
    num_lines: int = 30,
    with_volumes: bool = True,
    spacing_mm: tuple[float, ...] = SPACING,
    **changes: Any,
) -> Path:
    """A run folder as training leaves it, without training."""
    settings = Settings.model_validate({**TINY, "name": name, **changes})
    run = RunFolder(folder / name)
    run.path.mkdir(parents=True)
    run.config.write_text(dump_yaml(settings))
    command = ["train_autoencoder.py", "--config", "preset.yaml"]
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
        _save_volumes(run, spacing_mm)
    (run.path / "memory_autoencoder.json").write_text(json.dumps({"prediction": PREDICTION}))
    return run.path


def _save_volumes(run: RunFolder, spacing_mm: tuple[float, ...]) -> None:
    """Write two validations of stage 1 with two held-out volumes, and one of stage 2 with three samples."""
    image = volume_with_gradient((16, 20, 24))

    def shown(volume: torch.Tensor, name: str, note: str = "") -> ViewerVolume:
        return ViewerVolume.of(volume, spacing_mm, name, note)

    for step in (10, 20):
        pairs: dict[str, ViewerVolume] = {}
        for place in range(2):
            held_out = image.flip(1) if place else image
            pairs[f"input_{place}"] = shown(held_out, f"held_out_{place}.nii.gz")
            pairs[f"reconstruction_{place}"] = shown(held_out * (1 - 1 / step), f"held_out_{place}.nii.gz")
        save_viewer_volumes(run, "autoencoder", step, pairs)
    samples = {f"sample_{i}": shown(image.flip(i + 1), f"sample {i + 1}", "class lesion") for i in range(3)}
    samples |= {f"nearest_{i}": shown(image * 0.5, f"train_{i}.nii.gz", "distance 0.123") for i in range(3)}
    samples |= {f"real_{i}": shown(-image, f"held_out_{i}.nii.gz") for i in range(2)}
    save_viewer_volumes(run, "ldm", 5, samples)
