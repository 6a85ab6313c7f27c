"""Generates head-like phantoms in three visibly different classes: nested ellipsoids, vessels, texture and noise.

Phantom i depends on (seed, i, grid, channels) only. It is written once, as a NIfTI file, and reused by later runs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.ndimage import gaussian_filter

from data.formats import write_nifti
from runtime.cli import ProgressBar
from runtime.files import exclusive_lock
from settings import DataError

CLASS_NAMES = ("healthy", "lesion", "ventricles")

# Part of the folder's name: change it whenever the same seed gives different voxels.
VERSION = 3

EXTENT_MM = (200.0, 240.0, 200.0)
LARGEST_INTENSITY = 1000.0
# Standard deviation in voxels, because a scanner resolves about 1.6 voxels (full width at half maximum), not one.
POINT_SPREAD = 0.7


def phantom_files(folder: Path, number: int, grid: tuple[int, ...], num_channels: int, seed: int) -> list[Path]:
    """Return the paths of the phantoms, generating those that do not exist yet; raise DataError if that fails.

    Files are written atomically, so a killed process can simply be run again. If several processes call this, one
    generates and the others wait.
    """
    paths = phantom_paths(folder, number, grid, num_channels, seed)
    root = paths[0].parent.parent
    if all(path.exists() for path in paths):
        return paths
    with exclusive_lock(root / ".lock"):
        missing = [i for i, path in enumerate(paths) if not path.exists()]
        for i in ProgressBar(missing, desc="generating phantoms", unit="volume", leave=False) if missing else ():
            voxels = phantom(i, grid, num_channels, seed)
            try:
                write_nifti(paths[i], voxels.round().astype(np.int16), affine_of(grid))
            except OSError as error:
                raise DataError(
                    f"data.source: phantoms cannot be written to {root} ({error.strerror}); "
                    "a writable folder with free space is needed; run the command where runs/ can be written"
                ) from error
    return paths


def phantom_paths(folder: Path, number: int, grid: tuple[int, ...], num_channels: int, seed: int) -> list[Path]:
    """Return where the phantoms of one grid, number of channels and seed are, or will be."""
    root = folder / f"{'x'.join(map(str, grid))}_channels{num_channels}_seed{seed}_v{VERSION}"
    return [root / CLASS_NAMES[i % len(CLASS_NAMES)] / f"phantom_{i:04d}.nii.gz" for i in range(number)]


def affine_of(grid: tuple[int, ...]) -> np.ndarray:
    """Return an affine (RAS+, millimetres) that centres a head-sized grid on the origin."""
    spacing = np.array(EXTENT_MM) / np.array(grid)
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = -spacing * (np.array(grid) - 1) / 2
    return affine


def phantom(index: int, grid: tuple[int, ...], num_channels: int, seed: int) -> np.ndarray:
    """Return phantom `index` as float32 (C, D, H, W) with intensities in [0, 1000]; its class is index % 3."""
    rng = generator_of(index, seed)
    kind = CLASS_NAMES[index % len(CLASS_NAMES)]
    axes = [((np.arange(n) + 0.5) / n * 2 - 1).astype(np.float32) for n in grid]
    canvas = _Canvas(axes, num_channels)

    head, tilt, centre = pose(rng)
    canvas.ellipsoid(centre, head, tilt, rng.uniform(0.30, 0.38))
    canvas.ellipsoid(centre, head * 0.93, tilt, rng.uniform(0.85, 0.95))
    canvas.ellipsoid(centre, head * 0.86, tilt, rng.uniform(0.12, 0.18))
    canvas.ellipsoid(centre, head * 0.82, tilt, rng.uniform(0.48, 0.56))
    canvas.ellipsoid(centre, head * rng.uniform(0.60, 0.66), tilt, rng.uniform(0.62, 0.70))
    canvas.texture(rng)

    # Two ventricles.
    scale = rng.uniform(1.7, 2.1) if kind == "ventricles" else 1.0
    radii, value = head * rng.uniform((0.09, 0.26, 0.12), (0.12, 0.34, 0.16)) * scale, rng.uniform(0.14, 0.20)
    for side in (-1.0, 1.0):
        offset = tilt @ (head * (side * 0.15 * scale**0.5, 0.02, 0.06))
        turn = tilt @ _rotation(np.array([0.0, 0.0, -side * rng.uniform(0.15, 0.35)]))
        canvas.ellipsoid(centre + offset, radii, turn, value)

    # Two nuclei on each side.
    value = rng.uniform(0.40, 0.50)
    for side in (-1.0, -1.0, 1.0, 1.0):
        offset = head * rng.uniform((0.22, -0.35, -0.25), (0.36, 0.25, -0.05)) * (side, 1.0, 1.0)
        radii = head * rng.uniform(0.06, 0.12, size=3)
        canvas.ellipsoid(centre + tilt @ offset, radii, tilt @ _rotation(rng.uniform(-0.6, 0.6, size=3)), value)

    for _ in range(rng.integers(3, 6)):
        _vessel(canvas, rng, centre, head * 0.74)
    if kind == "lesion":
        side = rng.choice([-1.0, 1.0])
        offset = head * (side * rng.uniform(0.28, 0.42), rng.uniform(-0.35, 0.35), rng.uniform(0.0, 0.3))
        radii, turn = head * rng.uniform(0.28, 0.36, size=3), tilt @ _rotation(rng.uniform(-0.8, 0.8, size=3))
        for share, low, high in ((1.35, 0.34, 0.40), (1.0, 0.95, 1.0), (0.5, 0.20, 0.28)):
            canvas.ellipsoid(centre + tilt @ offset, radii * share, turn, rng.uniform(low, high))
    return canvas.finished(rng)


def generator_of(index: int, seed: int) -> np.random.Generator:
    """Return the random numbers of one phantom, from the first on."""
    return np.random.default_rng([seed, index, 0x9E37])


def pose(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the radii of a head, its rotation and its centre, which differ as in scans that nobody registered."""
    head = rng.uniform((0.58, 0.64, 0.60), (0.76, 0.82, 0.78))
    return head, _rotation(rng.uniform(-0.35, 0.35, size=3)), rng.uniform(-0.14, 0.14, size=3)


def _vessel(canvas: _Canvas, rng: np.random.Generator, centre: np.ndarray, reach: np.ndarray) -> None:
    """Paint a tapering tube along a smooth random walk from the bottom of the head upwards."""
    steps = 28
    direction = np.array([0.0, 0.0, 1.0]) + rng.normal(0.0, 0.3, size=3)
    position = rng.uniform((-0.35, -0.35, -0.85), (0.35, 0.35, -0.65))
    radius, value = rng.uniform(0.035, 0.055), rng.uniform(0.92, 1.0)
    for step in range(steps):
        direction = direction + rng.normal(0.0, 0.35, size=3)
        direction /= np.linalg.norm(direction)
        position = position + direction * 1.6 / steps
        outside = np.linalg.norm(position)
        if outside > 0.95:
            position *= 0.95 / outside
        thickness = radius * (1 - 0.6 * step / steps)
        canvas.ellipsoid(centre + position * reach, np.full(3, thickness), np.eye(3), value)


class _Canvas:
    """A volume on which soft-edged ellipsoids are painted over one another; coordinates are in [-1, 1]."""

    def __init__(self, axes: list[np.ndarray], num_channels: int) -> None:
        self.axes = axes
        self.grid = tuple(len(axis) for axis in axes)
        self.edge = 1.0 / min(self.grid)
        self.num_channels = num_channels
        self.voxels = np.zeros(self.grid, dtype=np.float32)

    def ellipsoid(self, centre: np.ndarray, radii: np.ndarray, turn: np.ndarray, value: float) -> None:
        """Paint one ellipsoid whose edge is about one voxel wide, touching only its bounding box."""
        reach = np.sqrt((turn**2) @ (radii**2)) + 2 * self.edge
        box = tuple(
            slice(int(np.searchsorted(axis, c - r)), int(np.searchsorted(axis, c + r)))
            for axis, c, r in zip(self.axes, centre, reach, strict=True)
        )
        if any(part.start >= part.stop for part in box):
            return
        x, y, z = (axis[part] - np.float32(c) for axis, part, c in zip(self.axes, box, centre, strict=True))
        x, y, z = x[:, None, None], y[None, :, None], z[None, None, :]
        toward = (turn.T / radii[:, None]).astype(np.float32)
        distance = np.zeros((x.size, y.size, z.size), dtype=np.float32)
        for a, b, c in toward:
            part = (x * a + y * b) + z * c
            part *= part
            distance += part
        np.sqrt(distance, out=distance)
        distance -= 1
        distance *= np.float32(-min(radii) / self.edge)
        distance += 0.5
        coverage = np.clip(distance, 0, 1, out=distance)
        painted = self.voxels[box]
        painted += coverage * (np.float32(value) - painted)

    def texture(self, rng: np.random.Generator) -> None:
        """Modulate the volume painted so far with two octaves of smooth noise."""
        field = _smooth_noise(rng, self.grid, 6) + np.float32(0.6) * _smooth_noise(rng, self.grid, 14)
        self.voxels *= 1 + np.float32(0.08) * field

    def finished(self, rng: np.random.Generator) -> np.ndarray:
        """Add a scanner's blur, bias field and noise; further channels show the same anatomy in another contrast."""
        blurred = gaussian_filter(self.voxels, POINT_SPREAD, truncate=2.5)
        bias = 1 + np.float32(0.06) * _smooth_noise(rng, self.grid, 3)
        channels = np.empty((self.num_channels, *self.grid), dtype=np.float32)
        for c, channel in enumerate(channels):
            np.power(np.clip(blurred, 0, 1), np.float32(1 / (1 + 0.7 * c)), out=channel)
            channel *= bias
            channel += np.float32(0.012) * rng.standard_normal(self.grid, dtype=np.float32)
        channels *= np.float32(LARGEST_INTENSITY * 0.9)
        return np.clip(channels, 0, LARGEST_INTENSITY, out=channels)


def _smooth_noise(rng: np.random.Generator, grid: tuple[int, ...], knots: int) -> np.ndarray:
    """Return noise of roughly unit standard deviation, with a length scale of 1 / knots of the volume."""
    field = rng.standard_normal((knots + 1,) * 3, dtype=np.float32)
    for axis, n in enumerate(grid):
        place = (np.arange(n) + 0.5) / n * knots
        left = np.floor(place).astype(int)
        # Smoothstep between the knots leaves no visible creases.
        t = (place - left).astype(np.float32)
        t = t * t * (3 - 2 * t)
        shape = [1, 1, 1]
        shape[axis] = n
        t = t.reshape(shape)
        field = np.take(field, left, axis) * (1 - t) + np.take(field, left + 1, axis) * t
    return field


def _rotation(angles: np.ndarray) -> np.ndarray:
    (cx, cy, cz), (sx, sy, sz) = np.cos(angles), np.sin(angles)
    about_x = np.array([[1, 0, 0], [0, cx, -sx], [0, sx, cx]])
    about_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    about_z = np.array([[cz, -sz, 0], [sz, cz, 0], [0, 0, 1]])
    return about_x @ about_y @ about_z
