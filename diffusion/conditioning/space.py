"""The space of a condition from the command line, which its samples are written in: grid, affine, intensities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.geometry import Geometry
from data.loading import on_file_grid
from diffusion.conditioning.known_voxels import NOTHING_KNOWN, KnownVoxels


@dataclass(frozen=True)
class Space:
    """Where a condition lies.

    `lower` and `upper` are its intensities if its samples have the same, as they have if it is made from its target.
    Then `voxels` (C, X, Y, Z) are those of its file, and samples keep what is `known`, on the file's axes. With a hole,
    `on_grid` has what is known on the network's grid, and the condition there in [0, 1].
    """

    geometry: Geometry
    lower: tuple[float, ...] | None = None
    upper: tuple[float, ...] | None = None
    voxels: np.ndarray | None = None
    known: KnownVoxels = NOTHING_KNOWN
    on_grid: tuple[KnownVoxels, Tensor] | None = None

    def restored(self, unit: np.ndarray, lower: tuple[float, ...], upper: tuple[float, ...]) -> np.ndarray:
        """Return a sample (C, D, H, W) in [0, 1] on the file's grid; `lower` and `upper` are the training set's."""
        if self.on_grid is not None:
            known, image = self.on_grid
            unit = known.kept_in(torch.from_numpy(unit), image).clamp(0, 1).numpy()
        result = on_file_grid(unit * 2 - 1, self.geometry, self.lower or lower, self.upper or upper)
        if self.voxels is None:
            return result
        if self.known.unknown is not None:
            return np.where(self.known.unknown.numpy(), result, self.voxels)
        return self.known.kept_in(torch.from_numpy(result), torch.from_numpy(self.voxels)).numpy()

    def shown(
        self, restored: np.ndarray, lower: tuple[float, ...], upper: tuple[float, ...]
    ) -> tuple[Tensor, tuple[float, ...], tuple[int, ...] | None]:
        """Return the first channel of what `restored` returned for a picture, (D, H, W) in [0, 1], and its spacing.

        The third result is a voxel amid those that were unknown; None if there were none.
        """
        low, high = (
            np.float32((ends or of_training)[0]) for ends, of_training in ((self.lower, lower), (self.upper, upper))
        )
        unit = (self.geometry.oriented(restored)[0] - low) / np.maximum(high - low, np.finfo(np.float32).tiny)
        spacing_mm = np.linalg.norm(self.geometry.affine[:3, list(self.geometry.axes)], axis=0)
        at, unknown = None, self.known.unknown
        if unknown is not None and unknown.any():
            places = np.argwhere(self.geometry.oriented(unknown.numpy()[None])[0])
            distances = np.square(places - places.mean(axis=0)).sum(axis=1)
            at = tuple(places[distances.argmin()].tolist())
        return torch.from_numpy(unit.clip(0, 1)), tuple(spacing_mm.tolist()), at
