"""Reads a label map as the share of each label value in each voxel of a coarser grid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.formats import read_stored
from data.geometry import geometry_of
from data.reading import VolumeFacts
from settings.data import DataSettings
from storage.names import printable


def label_shares(path: Path, num_classes: int, s: DataSettings, grid: Sequence[int]) -> np.ndarray:
    """Return float32 (num_classes, D, H, W): the share of each label value in each voxel of `grid`.

    The map takes the volume's way to the network's grid, so both are turned, resampled and cropped alike; what padding
    adds is background. From there voxels are averaged. `grid` divides the network's grid.
    """
    stored, header = read_stored(path)
    geometry = geometry_of(header, s)
    oriented = geometry.oriented(stored.array)
    shares = np.zeros((num_classes, *grid), np.float32)
    for value in range(1, num_classes):

        def planes(part: slice, value: int = value) -> np.ndarray:
            # In the network's range, because padding gets its lower end: no share.
            return 2 * (stored.values(oriented[..., part]) == value).astype(np.float32) - 1

        shares[value] = _averaged(geometry.to_network_grid(1, planes)[0] / 2 + 0.5, grid)
    shares[0] = np.maximum(1 - shares[1:].sum(axis=0), 0)
    return shares


def mask_on_grid(path: Path, s: DataSettings) -> np.ndarray:
    """Return bool (D, H, W) on the network's grid: True wherever a mask above 0 covers any part of a voxel."""
    stored, header = read_stored(path)
    geometry = geometry_of(header, s)
    oriented = geometry.oriented(stored.array)

    def planes(part: slice) -> np.ndarray:
        return 2 * (stored.values(oriented[..., part]) > 0).astype(np.float32) - 1

    # A little above the lower end, for the rounding of weights that add up to 1.
    return geometry.to_network_grid(1, planes)[0] > -1 + 1e-4


def mask_problem(path: Path, facts: VolumeFacts) -> str | None:
    """Return why a file cannot be a mask, or None if it can."""
    if facts.num_channels != 1 or facts.num_not_finite:
        found = f"{facts.num_channels} channels" if facts.num_channels != 1 else "values that are not finite"
        return f"{printable(path)}: {found}; a mask has one channel of finite numbers; repair it"
    return None


def label_problem(path: Path, facts: VolumeFacts, num_classes: int, where: str) -> str | None:
    """Return why a file cannot be a label map of `num_classes` values, or None if it can."""
    name = printable(path)
    if facts.num_channels != 1:
        return (
            f"{name}: {facts.num_channels} channels ({' x '.join(map(str, facts.axes))}); a label map has one; "
            "merge them into one map"
        )
    if not facts.is_whole:
        return f"{name}: values that are not whole numbers, so it is not a label map; round it or take it out"
    if facts.minimum < 0 or facts.maximum >= num_classes:
        remedy = f"set {int(facts.maximum) + 1}, or change the map" if facts.minimum >= 0 else "change the map"
        return (
            f"{name}: label values from {facts.minimum:g} to {facts.maximum:g}; {where}.num_classes: {num_classes} "
            f"allows 0 to {num_classes - 1}; {remedy}"
        )
    return None


def _averaged(image: np.ndarray, grid: Sequence[int]) -> np.ndarray:
    """Average equal blocks of a (D, H, W) volume, one for each voxel of `grid`."""
    d, h, w = grid
    parts = image.reshape(d, image.shape[0] // d, h, image.shape[1] // h, w, image.shape[2] // w)
    return parts.mean(axis=(1, 3, 5), dtype=np.float32)
