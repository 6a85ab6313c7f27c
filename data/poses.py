"""Poses: rotations, scalings and translations that augmentation gives to a volume and whatever lies on its grid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.ndimage import affine_transform

# Large enough to matter, small enough to keep anatomy plausible.
LARGEST_ROTATION_DEGREES = 8.0
LARGEST_SCALING = 0.1
LARGEST_TRANSLATION = 0.04


@dataclass(frozen=True)
class Pose:
    """An affine map about the centre of a grid: a matrix on voxel offsets, and a translation in shares of the grid."""

    matrix: np.ndarray
    translation: np.ndarray

    def apply(self, image: np.ndarray, order: int = 3) -> np.ndarray:
        """Return (D, H, W) in this pose by splines of the given order; points outside take the nearest voxel.

        Cubic splines keep detail that linear interpolation smooths away; linear interpolation keeps the range.
        """
        size = np.array(image.shape)
        centre = (size - 1) / 2
        offset = centre - self.matrix @ centre + self.translation * size
        posed: np.ndarray = affine_transform(image, self.matrix, offset, order=order, mode="nearest")
        return posed


def random_pose(spacing_mm: np.ndarray, rng: np.random.Generator, scales: bool = True) -> Pose:
    """Draw a pose; without flips, because samples would show them, and bodies are not symmetric."""
    matrix = random_rotation(spacing_mm, rng, scales)
    return Pose(matrix, rng.uniform(-LARGEST_TRANSLATION, LARGEST_TRANSLATION, size=3))


def random_rotation(spacing_mm: np.ndarray, rng: np.random.Generator, scales: bool = True) -> np.ndarray:
    """Draw a rotation, rigid in millimetres, and, if it `scales`, a scaling as a matrix on voxel offsets."""
    angles = np.deg2rad(rng.uniform(-LARGEST_ROTATION_DEGREES, LARGEST_ROTATION_DEGREES, size=3))
    scaling = rng.uniform(1 - LARGEST_SCALING, 1 + LARGEST_SCALING) if scales else 1.0
    rotation = np.eye(3)
    for axis, angle in enumerate(angles):
        a, b = [other for other in range(3) if other != axis]
        turn = np.eye(3)
        turn[a, a] = turn[b, b] = np.cos(angle)
        turn[a, b], turn[b, a] = -np.sin(angle), np.sin(angle)
        rotation = rotation @ turn
    return np.diag(1 / spacing_mm) @ rotation @ np.diag(spacing_mm) * scaling
