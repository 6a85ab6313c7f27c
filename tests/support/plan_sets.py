"""Five data sets as files, for trying plans: CT, MR, thick slices, small crops, two channels."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np

Values = Callable[[np.random.Generator, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class VolumeSet:
    """How many volumes, how large (mean and variation), and how their intensities follow from a distance map."""

    number: int
    size: tuple[int, int, int]
    variation: float
    spacing_mm: tuple[float, float, float]
    values: Values
    dtype: str
    num_channels: int = 1


def _ct(rng: np.random.Generator, distance: np.ndarray) -> np.ndarray:
    tissue = np.where(distance < 0.15, 700.0, 40.0) + rng.normal(0, 25, distance.shape)
    return np.where(distance < 0.8, tissue, -1024.0)


def _mr(rng: np.random.Generator, distance: np.ndarray) -> np.ndarray:
    gain = rng.uniform(300, 3000)
    return gain * np.where(distance < 0.8, 1 - 0.5 * distance + rng.normal(0, 0.05, distance.shape), 0.0).clip(0)


def _filled(rng: np.random.Generator, distance: np.ndarray) -> np.ndarray:
    return rng.uniform(300, 900) * (1.2 - 0.4 * distance + rng.normal(0, 0.1, distance.shape)).clip(0.2)


SETS = {
    "CT": VolumeSet(120, (320, 320, 100), 1.15, (1.2, 1.2, 2.5), _ct, "int16"),
    "MR": VolumeSet(200, (160, 192, 160), 1.0, (1.0, 1.0, 1.0), _mr, "float32"),
    "thick slices": VolumeSet(80, (320, 320, 24), 1.0, (0.8, 0.8, 5.0), _mr, "float32"),
    "small crops": VolumeSet(200, (35, 50, 36), 1.2, (1.0, 1.0, 1.0), _filled, "float32"),
    "two channels": VolumeSet(60, (128, 128, 96), 1.0, (1.5, 1.5, 2.0), _mr, "float32", 2),
}
DIFFERENT = 6
"""How many different volumes a set has; the others are links to them, which saves most of the writing."""


def write_set(folder: Path, volumes: VolumeSet, different: int = DIFFERENT) -> None:
    """Write the volumes of a set as .nii files."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for number in range(volumes.number):
        path = folder / f"volume_{number:03d}.nii"
        if number >= different:
            os.link(folder / f"volume_{number % different:03d}.nii", path)
            continue
        low, high = 1 / volumes.variation, volumes.variation
        size = [max(2, round(n * rng.uniform(low, high))) for n in volumes.size]
        axes = np.meshgrid(*(np.linspace(-1, 1, n) for n in size), indexing="ij", sparse=True)
        distance = np.sqrt(sum(axis**2 for axis in axes))
        channels = [volumes.values(rng, distance).astype(volumes.dtype) for _ in range(volumes.num_channels)]
        voxels = channels[0] if len(channels) == 1 else np.stack(channels, axis=-1)
        nib.save(nib.Nifti1Image(voxels, np.diag([*volumes.spacing_mm, 1.0])), path)
