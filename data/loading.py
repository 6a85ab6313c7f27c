"""Loads volumes as tensors on the network's grid and in its range, undoes that, and draws patches and poses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.ndimage import affine_transform
from torch import Tensor

from data.checking import PreparedFolder, VolumeFacts, measure, on_grid, unusable
from data.discovery import VolumeFile
from data.formats import channels_text
from data.geometry import NETWORK_RANGE, Geometry, geometry_of, to_intensities
from data.header import FileError
from data.store import StoredError
from runtime.files import printable
from settings.data import DataSettings

# Of augmentation in stage 1, in voxels: an autoencoder that compresses 4x4x4 meets every offset from its grid.
LARGEST_SHIFT = 2
# Of augmentation in stage 2: large enough to matter, small enough to keep anatomy plausible.
LARGEST_ROTATION_DEGREES = 8.0
LARGEST_SCALING = 0.1
LARGEST_TRANSLATION = 0.04


@dataclass(frozen=True)
class LoadedVolume:
    """A volume on the network's grid, in the network's range, with what `restore` needs.

    `image` is float32 (C, D, H, W); its spatial axes are those of `data.voxel_size`. `lower` and `upper` are the
    intensities of each channel that map to the ends of the network's range. `digest` is the hash of the file's bytes.
    """

    image: Tensor
    geometry: Geometry
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    digest: str = ""


def to_unit(image: Tensor) -> Tensor:
    """Map the network's range to [0, 1]; clip values that a network put outside."""
    low, high = NETWORK_RANGE
    return ((image - low) / (high - low)).clamp(0.0, 1.0)


def from_unit(image: Tensor) -> Tensor:
    """Map [0, 1] to the network's range."""
    low, high = NETWORK_RANGE
    return image * (high - low) + low


def load_volume(path: str | Path, s: DataSettings, num_channels: int | None = None) -> LoadedVolume:
    """Read one file and bring it to the network's grid and range.

    Raises DataError, naming the file, if it cannot be read, holds values that are not finite, has no contrast, or does
    not have `num_channels` channels.
    """
    stored, facts = measure(Path(path), s)
    is_other = num_channels is not None and facts.num_channels != num_channels
    problem = channels_text(facts, num_channels or 0) if is_other else unusable(facts, s)
    if problem is not None:
        raise FileError(path, problem)
    return _loaded(on_grid(stored, facts, s), facts, s)


def load_file(file: VolumeFile, s: DataSettings) -> LoadedVolume:
    """Return a checked volume: the prepared one if `data.prepared` is disk, else as `load_volume` does.

    The image may be a view of the prepared file; writing to it does not change the file. Raises DataError, naming the
    volume, if it can no longer be read or is not the one that was checked.
    """
    if s.prepared == "disk" and file.digest:
        folder = PreparedFolder(s)
        try:
            return _loaded(*folder.volume(file.digest, file.num_channels), s)
        except StoredError as error:
            text = f"the prepared volume of {printable(file.name)} cannot be used, {error}"
            remedy = "run the same command again to prepare it anew"
            raise FileError(folder.path_of(file.digest), f"{text}; {remedy}") from None
    loaded = load_volume(file.path, s, file.num_channels)
    if file.digest and loaded.digest != file.digest:
        raise FileError(file.path, "changed since it was checked; run the same command again")
    return loaded


def _loaded(image: np.ndarray, facts: VolumeFacts, s: DataSettings) -> LoadedVolume:
    geometry = geometry_of(facts, s)
    return LoadedVolume(torch.from_numpy(image), geometry, facts.lower, facts.upper, facts.digest)


def restore(image: Tensor, loaded: LoadedVolume) -> tuple[np.ndarray, np.ndarray]:
    """Bring a volume from the network's grid and range back to those of the file.

    Returns float32 voxels (C, then the file's axes) in the file's intensities, and the file's affine. Voxels that
    `crop_or_pad` cropped away come back as the lower intensity; clipped intensities stay clipped.
    """
    voxels = image.detach().to("cpu", torch.float32).numpy()
    return on_file_grid(voxels, loaded.geometry, loaded.lower, loaded.upper), loaded.geometry.affine


def on_file_grid(
    voxels: np.ndarray, geometry: Geometry, lower: tuple[float, ...], upper: tuple[float, ...]
) -> np.ndarray:
    """Bring float32 voxels (C, D, H, W) from the network's grid and range to a file's, with these intensities."""
    assert voxels.shape == (len(lower), *geometry.grid), f"{voxels.shape} is not on the grid {geometry.grid}"
    low, high = NETWORK_RANGE
    unit = (geometry.to_file_grid(voxels) - low) / (high - low)
    return np.ascontiguousarray(to_intensities(unit, lower, upper), dtype=np.float32)


def random_part(image: Tensor, s: DataSettings, rng: np.random.Generator) -> Tensor:
    """Cut a random patch out of a loaded volume and augment it, as the settings say; may return a view of `image`.

    Augmentation flips axes and moves by whole voxels, so that nothing is interpolated; at an edge voxels repeat.
    """
    grid = np.array(s.training_grid)
    corner = rng.integers(0, np.array(image.shape[1:]) - grid + 1)
    if not s.use_augmentation:
        x, y, z = corner.tolist()
        return image[:, x : x + grid[0], y : y + grid[1], z : z + grid[2]]
    corner += rng.integers(-LARGEST_SHIFT, LARGEST_SHIFT, size=3, endpoint=True)
    for axis, is_flipped in enumerate(rng.random(3) < 0.5):
        places = np.clip(corner[axis] + np.arange(grid[axis]), 0, image.shape[1 + axis] - 1)
        image = image.index_select(1 + axis, torch.from_numpy(np.flip(places).copy() if is_flipped else places))
    return image


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
    """Draw a pose, rigid in millimetres but for a scaling if it `scales`.

    There are no flips, because samples would show them, and bodies are not symmetric.
    """
    angles = np.deg2rad(rng.uniform(-LARGEST_ROTATION_DEGREES, LARGEST_ROTATION_DEGREES, size=3))
    scaling = rng.uniform(1 - LARGEST_SCALING, 1 + LARGEST_SCALING) if scales else 1.0
    rotation = np.eye(3)
    for axis, angle in enumerate(angles):
        a, b = [other for other in range(3) if other != axis]
        turn = np.eye(3)
        turn[a, a] = turn[b, b] = np.cos(angle)
        turn[a, b], turn[b, a] = -np.sin(angle), np.sin(angle)
        rotation = rotation @ turn
    matrix = np.diag(1 / spacing_mm) @ rotation @ np.diag(spacing_mm) * scaling
    return Pose(matrix, rng.uniform(-LARGEST_TRANSLATION, LARGEST_TRANSLATION, size=3))


def in_pose(image: Tensor, pose: Pose) -> Tensor:
    """Return a volume (C, D, H, W) of the network's range in another pose."""
    return torch.from_numpy(np.stack([pose.apply(channel) for channel in image.numpy()])).clamp_(*NETWORK_RANGE)
