"""Compares the space that two files cover."""

from __future__ import annotations

import itertools

import nibabel as nib
import numpy as np

from data.files.header import Header
from data.geometry import geometry_of
from runtime.files.names import printable
from settings.data import DataSettings


def mismatch(path: object, partner: Header, volume: object, header: Header, s: DataSettings) -> str | None:
    """Return why a partner does not cover the space of its volume, or None if it does to within a voxel.

    Their grids may differ, unless voxels are cropped or padded without being resampled. If one of the files stores
    neither spacing nor orientation, their voxels must correspond one by one: the same shape, axes in the same order and
    direction, and no `data.spacing`.
    """
    what = ""
    if partner.has_spacing and header.has_spacing:
        if np.abs(_corners(partner) - _corners(header)).max() > max(*partner.spacing_mm, *header.spacing_mm):
            what = "both must cover the same space to within a voxel; resample it to the volume's grid"
        elif s.resize == "crop_or_pad" and not _have_one_grid(partner, header, s):
            what = "data.resize: crop_or_pad needs both on one grid; set data.spacing, or resample it to the volume's"
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
    turns = nib.orientations.io_orientation(header.affine)
    ends: dict[int, tuple[int, tuple[float, float]]] = {}
    for axis, (n, (direction, flip)) in enumerate(zip(header.shape, turns, strict=True)):
        ends[int(direction)] = axis, (-0.5, n - 0.5) if flip > 0 else (n - 0.5, -0.5)
    corners = []
    for places in itertools.product((0, 1), repeat=3):
        index = np.ones(4)
        for direction, place in enumerate(places):
            axis, both = ends[direction]
            index[axis] = both[place]
        corners.append((header.affine @ index)[:3])
    return np.array(corners)


def _text(header: Header) -> str:
    shape = " x ".join(map(str, header.shape))
    if not header.has_spacing:
        return f"{shape} voxels"
    spacing = " x ".join(f"{mm:.3g}" for mm in header.spacing_mm)
    x, y, z = _corners(header)[0]
    return f"{shape} voxels of {spacing} mm from ({x:.1f}, {y:.1f}, {z:.1f})"
