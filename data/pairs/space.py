"""The space of a condition, which its samples are written in: grid, affine, intensities, and what is known."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.files.header import Header
from data.formats import read_header, read_stored
from data.geometry import Geometry, geometry_of, in_planes, regridded
from data.intensity import scale_to_network
from data.pairs.geometry import mismatch
from data.pairs.label_maps import mask_on_grid
from data.pairs.pairs import VOLUME, volume_problem, volume_reading
from data.reading import measure
from runtime.files.names import printable
from settings import DataError
from settings.conditioning import VolumeSettings
from settings.data import DataSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unknown:
    """What is unknown of a volume: bool on the network's grid (D, H, W) and on the file's."""

    on_grid: Tensor
    in_file: np.ndarray


@dataclass(frozen=True)
class Space:
    """Where a condition lies.

    `lower` and `upper` are its intensities if its samples have the same, as they have if it is made from its target.
    Then `voxels` are those of its file (C, X, Y, Z), and samples keep them: wherever `unknown` is False, or, if each
    stands for a block of `factors` voxels of the sample, as the mean of the block.
    """

    geometry: Geometry
    lower: tuple[float, ...] | None = None
    upper: tuple[float, ...] | None = None
    voxels: np.ndarray | None = None
    unknown: np.ndarray | None = None
    factors: tuple[int, ...] = (1, 1, 1)

    def restored(self, unit: np.ndarray, lower: tuple[float, ...], upper: tuple[float, ...]) -> np.ndarray:
        """Return a sample (C, D, H, W) in [0, 1] on the file's grid; `lower` and `upper` are the training set's."""
        low, high = self._ends(lower, upper)
        result = self.geometry.to_file_grid(unit * 2 - 1)
        result = (result / 2 + 0.5) * (high - low) + low
        if self.voxels is not None and self.unknown is not None:
            result = np.where(self.unknown, result, self.voxels)
        elif self.voxels is not None and self.factors != (1, 1, 1):
            result = result + _repeated(self.voxels - _block_means(result, self.factors), self.factors)
        return np.ascontiguousarray(result, dtype=np.float32)

    def shown(
        self, restored: np.ndarray, lower: tuple[float, ...], upper: tuple[float, ...]
    ) -> tuple[Tensor, tuple[float, ...], tuple[int, ...] | None]:
        """Return the first channel of what `restored` returned for a picture, (D, H, W) in [0, 1], and its spacing.

        The third result is a voxel amid those that were unknown; None if there were none.
        """
        low, high = self._ends(lower, upper)
        unit = (self.geometry.oriented(restored) - low) / np.maximum(high - low, np.finfo(np.float32).tiny)
        spacing_mm = np.linalg.norm(self.geometry.affine[:3, list(self.geometry.axes)], axis=0)
        at = None
        if self.unknown is not None and self.unknown.any():
            places = np.argwhere(self.geometry.oriented(self.unknown[None])[0])
            distances = np.square(places - places.mean(axis=0)).sum(axis=1)
            at = tuple(places[distances.argmin()].tolist())
        return torch.from_numpy(unit[0].clip(0, 1)), tuple(spacing_mm.tolist()), at

    def _ends(self, lower: tuple[float, ...], upper: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of the intensities of samples, for each channel (C, 1, 1, 1)."""
        low, high = (np.array(ends, np.float32) for ends in (self.lower or lower, self.upper or upper))
        return low[:, None, None, None], high[:, None, None, None]


def space_of_volume(
    path: Path, data: DataSettings, s: VolumeSettings, unknown: np.ndarray | None = None
) -> tuple[Tensor, Space]:
    """Read a condition volume onto the network's grid (C, D, H, W); return it with its space.

    A file of lower resolution than its target is first interpolated to the target's voxels. What the file holds where
    it is `unknown`, bool on its grid, has no influence.
    """
    reading = volume_reading(data, s)
    stored, facts = measure(path, reading, None if unknown is None else ~unknown)
    section = "data.intensity" if s.is_from_target else f"{VOLUME}.intensity"
    problem = volume_problem(path, facts, reading, s.num_channels, section)
    if problem is not None:
        raise DataError(problem)
    voxels, header, factors = stored.values(stored.array), facts.header, (1, 1, 1)
    if s.is_from_target and any(factor > 1 for factor in s.degrade.downsample):
        axes = geometry_of(header, reading).axes
        by_axis = dict(zip(axes, s.degrade.downsample, strict=True))
        factors = (by_axis[0], by_axis[1], by_axis[2])
        header = _finer(header, factors)
    geometry = geometry_of(header, reading)
    if unknown is not None:
        lowest = np.array(facts.lower, np.float32)[:, None, None, None]
        oriented = geometry.oriented(np.where(unknown, lowest, voxels))
    else:
        oriented = geometry.oriented(regridded(voxels, header.shape) if factors != (1, 1, 1) else voxels)
    parts = (scale_to_network(np.array(part, np.float32), facts.lower, facts.upper) for part in in_planes(oriented))
    image = torch.from_numpy(geometry.to_network_grid(facts.num_channels, parts))
    if not s.is_from_target:
        return image, Space(geometry)
    return image, Space(geometry, facts.lower, facts.upper, voxels, unknown, factors)


def mask_of(path: Path, volume: Path, data: DataSettings) -> Unknown:
    """Read a mask, above 0 where the volume is unknown; raise DataError unless it lies on the volume's grid.

    Its axes may have another order and direction.
    """
    stored, header = read_stored(path)
    of_volume = read_header(volume)
    geometry = geometry_of(of_volume, data)
    turned = geometry.stored_again(geometry_of(header, data).oriented(stored.array))
    if turned.shape[1:] != of_volume.shape:
        raise DataError(
            f"{printable(path)}: {' x '.join(map(str, header.shape))} voxels, and {printable(volume)} has "
            f"{' x '.join(map(str, of_volume.shape))}; a mask needs the shape of its volume; resample it"
        )
    problem = mismatch(path, header, volume, of_volume, data)
    if problem is not None:
        raise DataError(problem)
    unknown = stored.values(turned)[0] > 0
    if unknown.all():
        raise DataError(
            f"{printable(path)}: above 0 everywhere, so nothing of {printable(volume)} is known; a mask is 0 where the "
            "volume is known; change it"
        )
    _warn_of_what_is_cut_away(path, unknown, geometry)
    return Unknown(torch.from_numpy(mask_on_grid(path, data)), unknown)


def _warn_of_what_is_cut_away(path: Path, unknown: np.ndarray, geometry: Geometry) -> None:
    """Warn if a part of the hole lies outside the network's grid, where it cannot be filled."""
    inside = geometry.to_file_grid(np.ones((1, *geometry.grid), np.float32))[0] > 0
    number = int((unknown & ~inside).sum())
    if number:
        log.warning(
            "%s: %s of its %s voxels above 0 lie outside the network's grid and get the lowest intensity",
            printable(path),
            f"{number:,}",
            f"{int(unknown.sum()):,}",
        )


def _finer(header: Header, factors: tuple[int, int, int]) -> Header:
    """Return the header of the same volume with each voxel divided into blocks of `factors` voxels."""
    x, y, z = (n * factor for n, factor in zip(header.shape, factors, strict=True))
    division = np.diag([*(1 / factor for factor in factors), 1.0])
    division[:3, 3] = [(1 / factor - 1) / 2 for factor in factors]
    return replace(header, shape=(x, y, z), axes=(x, y, z), affine=header.affine @ division)


def _block_means(voxels: np.ndarray, factors: tuple[int, ...]) -> np.ndarray:
    shape = [part for n, factor in zip(voxels.shape[1:], factors, strict=True) for part in (n // factor, factor)]
    return voxels.reshape(len(voxels), *shape).mean(axis=(2, 4, 6))


def _repeated(voxels: np.ndarray, factors: tuple[int, ...]) -> np.ndarray:
    for axis, factor in enumerate(factors, start=1):
        voxels = np.repeat(voxels, factor, axis=axis)
    return voxels
