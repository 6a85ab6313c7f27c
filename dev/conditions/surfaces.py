"""Sparse grids to measure on: surfaces in empty space, as radar and lidar see them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

GRID = (32, 32, 32)


def write_surfaces(folder: Path, number: int) -> None:
    """Write grids as .npy files: 1 on the surfaces of some balls and on a tilted plane, 0 elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in range(number):
        np.save(folder / f"surfaces_{place:03d}.npy", surfaces(place))


def surfaces(place: int) -> np.ndarray:
    """Return one grid as float32; it depends on its number only."""
    rng = np.random.default_rng([place, 0x5F])
    axes = np.stack(np.meshgrid(*(np.arange(n) + 0.5 for n in GRID), indexing="ij"))
    grid = np.zeros(GRID, bool)
    for _ in range(3):
        centre, radius = rng.uniform(6, 26, 3), rng.uniform(3, 8)
        distance = np.sqrt(((axes - centre[:, None, None, None]) ** 2).sum(axis=0)) - radius
        # Seen from one side only.
        grid |= (np.abs(distance) < 0.5) & (axes[0] < centre[0] + radius / 2)
    tilt = rng.uniform(-0.2, 0.2, 2)
    height = rng.uniform(4, 12) + tilt[0] * axes[0] + tilt[1] * axes[1]
    grid |= (np.abs(axes[2] - height) < 0.5) & (axes[0] > rng.uniform(0, 12))
    return grid.astype(np.float32)
