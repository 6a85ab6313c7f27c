"""Moves volumes between the grid and intensities of their file and those of the network; compares the space of files.

The network sees intensities in [-1, 1] (`NETWORK_RANGE`): LPIPS expects that range, and it is symmetric about the zeros
that pad convolutions. A volume's lower and upper intensity are found on the whole volume, before any cropping, and map
to the two ends; values outside are clipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import nibabel as nib
import numpy as np
from scipy import sparse

from data.header import Header
from runtime.files import printable
from settings.data import DataSettings, IntensitySettings

Grid = tuple[int, ...]

NETWORK_RANGE = (-1.0, 1.0)

INTENSITY = "data.intensity"
"""The section with the rules of the volumes' intensities."""

# With fewer float32 steps than this between the two ends, no usable contrast is left.
FEWEST_STEPS = 64

# Planes read and scaled at a time.
PLANES = 8


@dataclass(frozen=True)
class Geometry:
    """How the file's grid maps to the network's grid, and back.

    `axes[i]` is the stored axis that becomes axis i, `flips[i]` whether it is reversed. `spaced_shape` is the shape
    after resampling to `data.spacing`. `affine` maps voxel indices of the file to millimetres, `grid_affine` those of
    the network's grid.
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

    def to_network_grid(self, num_channels: int, parts: Iterable[np.ndarray]) -> np.ndarray:
        """Bring a volume, already oriented and scaled to the network's range, to the network's grid.

        `parts` are the volume's `in_planes`, so that the whole of it need not be held as float32.
        """
        turned = tuple(self.shape[axis] for axis in self.axes)
        if not self.crops_or_pads and self.spaced_shape == turned:
            return _resampled(num_channels, parts, turned, self.grid)
        spaced = _resampled(num_channels, parts, turned, self.spaced_shape)
        return _crop_or_pad(spaced, self.grid) if self.crops_or_pads else regridded(spaced, self.grid)

    def to_file_grid(self, voxels: np.ndarray) -> np.ndarray:
        """Undo `oriented` and `to_network_grid`; voxels that were cropped away come back as the lower end."""
        spaced = self.spaced_shape
        voxels = _crop_or_pad(voxels, spaced) if self.crops_or_pads else regridded(voxels, spaced)
        return self.stored_again(regridded(voxels, tuple(self.shape[axis] for axis in self.axes)))

    def stored_again(self, voxels: np.ndarray) -> np.ndarray:
        """Undo `oriented`: return a view with the axes in the order and direction of the file."""
        return self._flipped(voxels).transpose(0, *(1 + int(axis) for axis in np.argsort(self.axes)))

    def oriented(self, voxels: np.ndarray) -> np.ndarray:
        """Return a view of the stored voxels with the axes in the order and direction of RAS."""
        return self._flipped(voxels.transpose(0, *(1 + axis for axis in self.axes)))

    def _flipped(self, voxels: np.ndarray) -> np.ndarray:
        return voxels[(slice(None), *(slice(None, None, -1 if flip else 1) for flip in self.flips))]


def geometry_of(header: Header, s: DataSettings) -> Geometry:
    """Work out how a volume gets from its own grid to the network's."""
    axes, flips, turned, affine = _turned_to_ras(header)
    spaced = turned
    if s.spacing is not None:
        own = np.linalg.norm(affine[:3, :3], axis=0)
        sizes = [n * mm / new for n, mm, new in zip(turned, own.tolist(), s.spacing, strict=True)]
        # Some formats store spacings in single precision; half a voxel rounds alike in all, so that pairs stay aligned.
        spaced = tuple(max(1, round(round(size, 4))) for size in sizes)
    affine = affine @ _regridding(turned, spaced, crops_or_pads=False)
    crops_or_pads = s.resize == "crop_or_pad"
    affine = affine @ _regridding(spaced, s.voxel_size, crops_or_pads)
    return Geometry(header.shape, header.affine, axes, flips, spaced, s.voxel_size, crops_or_pads, affine)


def _turned_to_ras(header: Header) -> tuple[tuple[int, ...], tuple[bool, ...], Grid, np.ndarray]:
    """Return the stored axis of each axis of RAS, whether it is reversed, and the shape and affine after turning."""
    turns = nib.orientations.ornt_transform(
        nib.orientations.io_orientation(header.affine), nib.orientations.axcodes2ornt("RAS")
    )
    axes = tuple(int(axis) for axis in np.argsort(turns[:, 0]))
    flips = tuple(bool(turns[axis, 1] < 0) for axis in axes)
    affine = header.affine @ nib.orientations.inv_ornt_aff(turns, header.shape)
    return axes, flips, tuple(header.shape[axis] for axis in axes), affine


def _crop_or_pad(image: np.ndarray, grid: Grid) -> np.ndarray:
    """Crop or pad each axis equally at both ends; padding has the value of the lower end of the range."""
    out = np.full((image.shape[0], *grid), NETWORK_RANGE[0], dtype=np.float32)
    source, target = [slice(None)], [slice(None)]
    for old, new in zip(image.shape[1:], grid, strict=True):
        start = _crop_start(old, new)
        overlap = min(old, new)
        source.append(slice(max(start, 0), max(start, 0) + overlap))
        target.append(slice(max(-start, 0), max(-start, 0) + overlap))
    out[tuple(target)] = image[tuple(source)]
    return out


def _crop_start(old: int, new: int) -> int:
    # Rounds towards zero for both signs, so cropping undoes padding exactly, and padding undoes cropping.
    return (old - new) // 2 if old >= new else -((new - old) // 2)


def _regridding(old: Grid, new: Grid, crops_or_pads: bool) -> np.ndarray:
    """Return the matrix that maps voxel indices of the new grid to those of the old one."""
    matrix = np.eye(4)
    for axis, (a, b) in enumerate(zip(old, new, strict=True)):
        if crops_or_pads:
            matrix[axis, 3] = _crop_start(a, b)
        else:
            # Both grids cover the same extent, measured between the outer faces of the outermost voxels.
            matrix[axis, axis] = a / b
            matrix[axis, 3] = (a / b - 1) / 2
    return matrix


def in_planes(volume: np.ndarray) -> Iterator[np.ndarray]:
    """Yield views of a few planes of the third axis at a time, (C, X, Y, planes)."""
    for start in range(0, volume.shape[-1], PLANES):
        yield volume[..., start : start + PLANES]


def regridded(image: np.ndarray, grid: Grid) -> np.ndarray:
    """Resample a (C, D, H, W) volume linearly to another grid over the same extent."""
    return _resampled(len(image), in_planes(image), image.shape[1:], grid)


def _resampled(num_channels: int, parts: Iterable[np.ndarray], old: Grid, new: Grid) -> np.ndarray:
    """Resample linearly to another grid over the same extent; average where voxels become larger.

    A few planes of the third axis at a time are resampled along the first two axes. Only that smaller volume is held.
    """
    along_x, along_y, along_z = (None if a == b else _interpolation(a, b) for a, b in zip(old, new, strict=True))
    flat = np.empty((old[2], num_channels, new[0], new[1]), np.float32)
    planes = (part[..., number] for part in parts for number in range(part.shape[-1]))
    for target, plane in zip(flat, planes, strict=True):
        for channel in range(num_channels):
            image = plane[channel] if along_x is None else along_x @ plane[channel]
            target[channel] = image if along_y is None else (along_y @ image.T).T
    if along_z is not None:
        flat = (along_z @ flat.reshape(old[2], -1)).reshape(new[2], *flat.shape[1:])
    return np.ascontiguousarray(np.moveaxis(flat, 0, -1))


def _interpolation(old: int, new: int) -> sparse.csr_array:
    """Return the (new, old) matrix of linear interpolation, with a triangle kernel as wide as the larger voxel."""
    ratio = old / new
    width = max(ratio, 1.0)
    centres = (np.arange(new) + 0.5) * ratio - 0.5
    taps = np.floor(centres - width).astype(int)[:, None] + np.arange(int(np.ceil(2 * width)) + 2)
    weights = np.maximum(0.0, 1.0 - np.abs(taps - centres[:, None]) / width)
    weights /= weights.sum(axis=1, keepdims=True)
    rows = np.broadcast_to(np.arange(new)[:, None], taps.shape)
    # Taps beyond the border repeat the outermost voxel; scipy sums entries at the same position.
    entries = (weights.astype(np.float32).ravel(), (rows.ravel(), taps.clip(0, old - 1).ravel()))
    matrix = sparse.coo_array(entries, shape=(new, old)).tocsr()
    matrix.eliminate_zeros()
    return matrix


def mismatch(path: object, partner: Header, volume: object, header: Header, s: DataSettings) -> str | None:
    """Return why a partner does not cover the space of its volume, or None if it does to within a voxel.

    Their grids may differ, unless voxels are cropped or padded without being resampled. If one of the files stores
    neither spacing nor orientation, their voxels must correspond one by one: the same shape, axes in the same order and
    direction, and no `data.spacing`.
    """
    what = ""
    if partner.has_spacing and header.has_spacing:
        if np.abs(_corners(partner) - _corners(header)).max() > max(*partner.spacing_mm, *header.spacing_mm):
            what = "both must cover the same space to within a voxel; resample it with scripts/resample.py"
        elif s.resize == "crop_or_pad" and not _have_one_grid(partner, header, s):
            what = "data.resize: crop_or_pad needs both on one grid; set data.spacing, or use scripts/resample.py"
    elif partner.shape != header.shape:
        what = "without a stored spacing both need the same shape; resample it to the volume's grid"
    elif partner.has_spacing != header.has_spacing:
        first, second = ("".join(nib.orientations.aff2axcodes(h.affine)) for h in (partner, header))
        if first != second:
            what = (
                f"an array without orientation is read as RAS, so one of them would be turned ({first} and {second}); "
                "convert the array to NIfTI with the affine of the other"
            )
        elif s.spacing is not None:
            what = "data.spacing is set, and one of them stores no spacing; convert it to NIfTI, or set null"
    if not what:
        return None
    return f"{printable(path)}: {_text(partner)}, and its volume {printable(volume)} has {_text(header)}; {what}"


def _have_one_grid(partner: Header, header: Header, s: DataSettings) -> bool:
    """Return whether two files that cover the same space have as many voxels before they are cropped or padded.

    After resampling to `data.spacing` the numbers may differ by one, because the space is the same to within a voxel.
    """
    shapes = (geometry_of(one, s).spaced_shape for one in (partner, header))
    return all(abs(a - b) <= (s.spacing is not None) for a, b in zip(*shapes, strict=True))


def _corners(header: Header) -> np.ndarray:
    """Return the positions of the eight corners of a volume in mm (8, 3), in the order that they have as RAS."""
    _, _, shape, affine = _turned_to_ras(header)
    corners = itertools.product(*((-0.5, n - 0.5) for n in shape))
    return np.array([(affine @ [*corner, 1.0])[:3] for corner in corners])


def _text(header: Header) -> str:
    shape = " x ".join(map(str, header.shape))
    if not header.has_spacing:
        return f"{shape} voxels"
    spacing = " x ".join(f"{mm:.3g}" for mm in header.spacing_mm)
    x, y, z = _corners(header)[0]
    return f"{shape} voxels of {spacing} mm from ({x:.1f}, {y:.1f}, {z:.1f})"


def scale_to_network(voxels: np.ndarray, lower: Sequence[float], upper: Sequence[float]) -> np.ndarray:
    """Clip each channel and map it to the network's range, in place; return the same array."""
    low, high = NETWORK_RANGE
    for channel, first, last in zip(voxels, lower, upper, strict=True):
        np.clip(channel, np.float32(first), np.float32(last), out=channel)
        channel -= np.float32(first)
        channel *= np.float32((high - low) / (last - first))
        channel += np.float32(low)
        np.clip(channel, low, high, out=channel)
    return voxels


def to_intensities(unit: np.ndarray, lower: Sequence[float], upper: Sequence[float]) -> np.ndarray:
    """Map a (C, D, H, W) volume from [0, 1] to intensities from `lower` to `upper`, of each channel."""
    low, high = (np.array(ends, np.float32)[:, None, None, None] for ends in (lower, upper))
    return unit * (high - low) + low


def range_problem(
    lower: Sequence[float], upper: Sequence[float], s: IntensitySettings, section: str = INTENSITY
) -> str | None:
    """Return why float32 cannot scale one of the channels from these ranges, or None if it can scale all."""
    limits = np.finfo(np.float32)
    for channel, (low, high) in enumerate(zip(lower, upper, strict=True)):
        if low >= high:
            _, first, second = s.of_channel(channel)
            return (
                f"channel {channel} is {low:g} at both the {first:g}th and the {second:g}th percentile; percentile "
                f"scaling needs contrast; for mostly empty volumes set {section}.lower=0 {section}.upper=100, or mode: "
                "window; otherwise remove the file"
            )
        # Differences or their inverse would overflow, or the numbers are so large that differences were rounded away.
        is_finite = float(limits.tiny) <= high - low <= float(limits.max)
        if not is_finite or high - low < FEWEST_STEPS * np.spacing(np.float32(max(abs(low), abs(high)))):
            return (
                f"channel {channel} is scaled from {low:.9g} to {high:.9g}, a range that float32 cannot resolve; "
                f"change the unit of its intensities, subtract an offset, or widen {section}"
            )
    return None
