"""Brings volumes to the network's grid and range, takes them back, and draws random crops and augmentations.

The network sees intensities in [-1, 1] (`NETWORK_RANGE`): what LPIPS expects, and symmetric about the zero padding of
its convolutions. A volume's lower and upper intensity, found on the whole volume before anything is cut off, map to
the two ends; what lies beyond is clipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from data.formats import Header, read_volume
from settings import DataError
from settings.data import DataSettings, IntensitySettings
from storage.names import printable

NETWORK_RANGE = (-1.0, 1.0)

# Augmentation: large enough to act, small enough to leave anatomy plausible.
LARGEST_ROTATION_DEGREES = 8.0
LARGEST_SCALING = 0.1
LARGEST_GAIN = 0.1
LARGEST_SHIFT = 0.1

Grid = tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """What links the network's grid with the file's own: enough to go both ways.

    `axes[i]` is the stored axis that becomes axis i, `flips[i]` whether it is reversed; `spaced_shape` is the shape
    after resampling to `data.spacing`; `affine` maps the file's voxels to millimetres, `grid_affine` the network's.
    """

    shape: Grid
    affine: np.ndarray
    axes: tuple[int, ...]
    flips: tuple[bool, ...]
    spaced_shape: Grid
    grid: Grid
    crops_or_pads: bool
    grid_affine: np.ndarray

    @property
    def spacing_mm(self) -> np.ndarray:
        """Return the distance between neighbouring voxels of the network's grid."""
        return np.linalg.norm(self.grid_affine[:3, :3], axis=0)


@dataclass(frozen=True)
class LoadedVolume:
    """A volume on the network's grid, in the network's range, with the way back.

    `image` is float32 (C, D, H, W), its axes being the first, second and third of `data.voxel_size`; `lower` and
    `upper` are the intensities of each channel that map to the ends of the network's range.
    """

    image: Tensor
    geometry: Geometry
    lower: tuple[float, ...]
    upper: tuple[float, ...]


def to_unit(image: Tensor) -> Tensor:
    """Map the network's range to [0, 1], clipping what a network put outside."""
    low, high = NETWORK_RANGE
    return ((image - low) / (high - low)).clamp(0.0, 1.0)


def from_unit(image: Tensor) -> Tensor:
    """Map [0, 1] to the network's range."""
    low, high = NETWORK_RANGE
    return image * (high - low) + low


def load_volume(path: str | Path, s: DataSettings, num_channels: int | None = None) -> LoadedVolume:
    """Read one file and bring it to the network's grid and range.

    Raises DataError in the file's name when it is unreadable, not finite, flat, or not of `num_channels` channels.
    """
    path = Path(path)
    voxels, header = read_volume(path)
    if num_channels is not None and header.num_channels != num_channels:
        raise DataError(channels_text(path, header, num_channels))
    lower, upper = intensity_range(voxels, s.intensity)
    if not np.isfinite([lower, upper]).all() or not np.isfinite(voxels.sum(dtype=np.float64)):
        raise DataError(f"{printable(path)}: it holds NaN or infinite voxels; replace them")
    if any(low >= high for low, high in zip(lower, upper, strict=True)):
        raise DataError(f"{printable(path)}: {flat_text(lower, upper, s.intensity)}")
    geometry = geometry_of(header, s)
    image = np.array(_oriented(voxels, geometry.axes, geometry.flips), order="C")
    for channel, low, high in zip(image, lower, upper, strict=True):
        _scale(channel, low, high)
    image = _resampled(image, geometry.spaced_shape)
    image = crop_or_pad(image, geometry.grid) if geometry.crops_or_pads else _resampled(image, geometry.grid)
    return LoadedVolume(torch.from_numpy(np.ascontiguousarray(image)), geometry, lower, upper)


def restore(image: Tensor, loaded: LoadedVolume) -> tuple[np.ndarray, np.ndarray]:
    """Bring a volume from the network's grid and range back onto the file's own.

    Returns float32 voxels (C, first, second, third stored axis) in the file's intensities and the file's affine. What
    `crop_or_pad` cut off comes back as the lower intensity, what the intensity range clipped stays clipped.
    """
    geometry = loaded.geometry
    voxels = image.detach().to("cpu", torch.float32).numpy()
    assert voxels.shape == (len(loaded.lower), *geometry.grid), f"{voxels.shape} is not on the grid {geometry.grid}"
    spaced = geometry.spaced_shape
    voxels = crop_or_pad(voxels, spaced) if geometry.crops_or_pads else _resampled(voxels, spaced)
    voxels = _resampled(voxels, tuple(geometry.shape[axis] for axis in geometry.axes))
    flipped = voxels[(slice(None), *(slice(None, None, -1 if flip else 1) for flip in geometry.flips))]
    stored = flipped.transpose(0, *(1 + int(axis) for axis in np.argsort(geometry.axes)))
    low, high = NETWORK_RANGE
    gain = (np.array(loaded.upper) - np.array(loaded.lower)) / (high - low)
    shift = np.array(loaded.lower) - low * gain
    restored = stored * gain.astype(np.float32)[:, None, None, None] + shift.astype(np.float32)[:, None, None, None]
    return np.ascontiguousarray(restored, dtype=np.float32), geometry.affine


def intensity_range(voxels: np.ndarray, s: IntensitySettings) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return for each channel the intensities that map to the lower and the upper end of the network's range."""
    if s.mode == "window":
        return (s.lower,) * len(voxels), (s.upper,) * len(voxels)
    with np.errstate(all="ignore"):
        ends = [np.percentile(channel, (s.lower, s.upper)) for channel in voxels]
    return tuple(float(low) for low, _ in ends), tuple(float(high) for _, high in ends)


def channels_text(path: Path, header: Header, num_channels: int) -> str:
    """Say that a file has another number of channels than the autoencoder."""
    return (
        f"{printable(path)}: {header.num_channels} channel{'s' if header.num_channels > 1 else ''} "
        f"({' x '.join(map(str, header.axes))}); autoencoder.in_channels is {num_channels}; "
        "change one of the two"
    )


def flat_text(lower: tuple[float, ...], upper: tuple[float, ...], s: IntensitySettings) -> str:
    """Say that a channel has no contrast between the two percentiles."""
    channel = next(c for c, (low, high) in enumerate(zip(lower, upper, strict=True)) if low >= high)
    return (
        f"channel {channel} is {lower[channel]:g} at both the {s.lower:g}th and the {s.upper:g}th percentile; "
        "percentile scaling needs contrast; remove it, widen data.intensity or use mode: window"
    )


def geometry_of(header: Header, s: DataSettings) -> Geometry:
    """Work out how a volume gets from its own grid to the network's."""
    turns = nib.orientations.ornt_transform(
        nib.orientations.io_orientation(header.affine), nib.orientations.axcodes2ornt(s.orientation)
    )
    axes = tuple(int(axis) for axis in np.argsort(turns[:, 0]))
    flips = tuple(bool(turns[axis, 1] < 0) for axis in axes)
    turned = tuple(header.shape[axis] for axis in axes)
    affine = header.affine @ nib.orientations.inv_ornt_aff(turns, header.shape)
    spaced = turned
    if s.spacing is not None:
        own = np.linalg.norm(affine[:3, :3], axis=0)
        spaced = tuple(max(1, round(n * mm / new)) for n, mm, new in zip(turned, own.tolist(), s.spacing, strict=True))
    affine = affine @ _regridding(turned, spaced, crops_or_pads=False)
    crops_or_pads = s.resize == "crop_or_pad"
    affine = affine @ _regridding(spaced, s.voxel_size, crops_or_pads)
    return Geometry(header.shape, header.affine, axes, flips, spaced, s.voxel_size, crops_or_pads, affine)


def crop_or_pad(image: np.ndarray, grid: Grid) -> np.ndarray:
    """Cut off or pad with the lower end of the range, equally at both ends of each axis, until the grid is reached."""
    out = np.full((image.shape[0], *grid), NETWORK_RANGE[0], dtype=np.float32)
    source, target = [slice(None)], [slice(None)]
    for old, new in zip(image.shape[1:], grid, strict=True):
        start = _crop_start(old, new)
        overlap = min(old, new)
        source.append(slice(max(start, 0), max(start, 0) + overlap))
        target.append(slice(max(-start, 0), max(-start, 0) + overlap))
    out[tuple(target)] = image[tuple(source)]
    return out


def random_part(image: Tensor, spacing_mm: np.ndarray, s: DataSettings, rng: np.random.Generator) -> Tensor:
    """Cut the random patch out of a loaded volume and augment it, as the settings say; may return `image` itself."""
    grid = np.array(s.training_grid)
    room = np.array(image.shape[1:]) - grid
    corner = rng.integers(0, room + 1)
    if not s.use_augmentation:
        x, y, z = corner.tolist()
        return image[:, x : x + grid[0], y : y + grid[1], z : z + grid[2]]
    matrix = _random_affine(spacing_mm, rng)
    gain, shift = rng.uniform(1 - LARGEST_GAIN, 1 + LARGEST_GAIN), rng.uniform(-LARGEST_SHIFT, LARGEST_SHIFT)
    patch = _sampled(image, grid, corner - room / 2, matrix)
    return patch.mul_(gain).add_(shift).clamp_(*NETWORK_RANGE)


def _scale(channel: np.ndarray, lower: float, upper: float) -> None:
    """Clip and map one channel to the network's range, in place."""
    low, high = NETWORK_RANGE
    np.clip(channel, np.float32(lower), np.float32(upper), out=channel)
    channel -= np.float32(lower)
    channel *= np.float32((high - low) / (upper - lower))
    channel += np.float32(low)
    np.clip(channel, low, high, out=channel)


def _oriented(voxels: np.ndarray, axes: tuple[int, ...], flips: tuple[bool, ...]) -> np.ndarray:
    turned = voxels.transpose(0, *(1 + axis for axis in axes))
    return turned[(slice(None), *(slice(None, None, -1 if flip else 1) for flip in flips))]


def _crop_start(old: int, new: int) -> int:
    # Rounded towards zero on both sides, so that cropping back undoes padding exactly, and padding back cropping.
    return (old - new) // 2 if old >= new else -((new - old) // 2)


def _regridding(old: Grid, new: Grid, crops_or_pads: bool) -> np.ndarray:
    """Return the matrix from voxel indices of the new grid to those of the old one."""
    matrix = np.eye(4)
    for axis, (a, b) in enumerate(zip(old, new, strict=True)):
        if crops_or_pads:
            matrix[axis, 3] = _crop_start(a, b)
        else:
            # Both grids cover the same extent, measured from the outer faces of the outer voxels.
            matrix[axis, axis] = a / b
            matrix[axis, 3] = (a / b - 1) / 2
    return matrix


def _resampled(image: np.ndarray, grid: Grid) -> np.ndarray:
    """Resample linearly to another grid over the same extent, averaging where voxels become larger."""
    for axis, (old, new) in enumerate(zip(image.shape[1:], grid, strict=True), start=1):
        if old == new:
            continue
        lines = np.moveaxis(image, axis, 0)
        resampled = _interpolation(old, new) @ np.ascontiguousarray(lines).reshape(old, -1)
        image = np.moveaxis(resampled.reshape(new, *lines.shape[1:]), 0, axis)
    return np.ascontiguousarray(image)


def _interpolation(old: int, new: int) -> sparse.csr_array:
    """Return the (new, old) matrix of linear interpolation with a triangle as wide as the larger voxel."""
    ratio = old / new
    width = max(ratio, 1.0)
    centres = (np.arange(new) + 0.5) * ratio - 0.5
    taps = np.floor(centres - width).astype(int)[:, None] + np.arange(int(np.ceil(2 * width)) + 2)
    weights = np.maximum(0.0, 1.0 - np.abs(taps - centres[:, None]) / width)
    weights /= weights.sum(axis=1, keepdims=True)
    rows = np.broadcast_to(np.arange(new)[:, None], taps.shape)
    # Beyond the border the outer voxel counts on; entries of equal position are summed.
    entries = (weights.astype(np.float32).ravel(), (rows.ravel(), taps.clip(0, old - 1).ravel()))
    matrix = sparse.coo_array(entries, shape=(new, old)).tocsr()
    matrix.eliminate_zeros()
    return matrix


def _random_affine(spacing_mm: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw flips, a rotation and a scaling, as a matrix on voxel offsets; the rotation is rigid in millimetres."""
    flips = np.where(rng.random(3) < 0.5, -1.0, 1.0)
    angles = np.deg2rad(rng.uniform(-LARGEST_ROTATION_DEGREES, LARGEST_ROTATION_DEGREES, size=3))
    scaling = rng.uniform(1 - LARGEST_SCALING, 1 + LARGEST_SCALING)
    rotation = np.eye(3)
    for axis, angle in enumerate(angles):
        a, b = [other for other in range(3) if other != axis]
        turn = np.eye(3)
        turn[a, a] = turn[b, b] = np.cos(angle)
        turn[a, b], turn[b, a] = -np.sin(angle), np.sin(angle)
        rotation = rotation @ turn
    return np.diag(1 / spacing_mm) @ rotation @ np.diag(spacing_mm * flips) * scaling


def _sampled(image: Tensor, grid: np.ndarray, centre: np.ndarray, matrix: np.ndarray) -> Tensor:
    """Sample a patch whose centre lies `centre` voxels off the volume's, turned by `matrix`, lower end outside."""
    size = np.array(image.shape[1:])
    offsets = [torch.arange(int(n), dtype=torch.float32) - (int(n) - 1) / 2 for n in grid]
    x, y, z = torch.meshgrid(*offsets, indexing="ij")
    coordinates = []
    # Written out rather than as a matrix product, whose rounding may depend on the number of threads.
    for axis in (2, 1, 0):
        a, b, c = (float(m) for m in matrix[axis] * 2 / size[axis])
        coordinates.append(x * a + y * b + z * c + float(centre[axis] * 2 / size[axis]))
    points = torch.stack(coordinates, dim=-1)[None]
    low = NETWORK_RANGE[0]
    sampled = torch.nn.functional.grid_sample(image[None] - low, points, align_corners=False, padding_mode="zeros")
    return sampled[0] + low
