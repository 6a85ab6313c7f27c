"""Compares the space that two files cover."""

from __future__ import annotations

import nibabel as nib
import numpy as np

from data.files.header import Header
from storage.names import printable


def mismatch(path: object, partner: Header, volume: object, header: Header) -> str | None:
    """Return why a partner does not cover the space of its volume, or None if it does to within a voxel.

    Their grids may differ. If one of the files stores no spacing, the shapes must be the same.
    """
    if partner.has_spacing and header.has_spacing:
        first, second = _ends(partner), _ends(header)
        if np.abs(first - second).max() <= max(*partner.spacing_mm, *header.spacing_mm):
            return None
        what = "both must cover the same space to within a voxel; resample it to the volume's grid"
    else:
        if partner.shape == header.shape:
            return None
        what = "without a stored spacing both need the same shape; resample it to the volume's grid"
    return f"{printable(path)}: {_text(partner)}, and its volume {printable(volume)} has {_text(header)}; {what}"


def _ends(header: Header) -> np.ndarray:
    """Return the positions of the two opposite corners of a volume, in mm, with the axes as RAS."""
    turns = nib.orientations.io_orientation(header.affine)
    lower = [-0.5 if flip > 0 else n - 0.5 for n, (_, flip) in zip(header.shape, turns, strict=True)]
    upper = [n - 0.5 if flip > 0 else -0.5 for n, (_, flip) in zip(header.shape, turns, strict=True)]
    return np.array([(header.affine @ [*corner, 1])[:3] for corner in (lower, upper)])


def _text(header: Header) -> str:
    shape = " x ".join(map(str, header.shape))
    if not header.has_spacing:
        return f"{shape} voxels"
    spacing = " x ".join(f"{mm:.3g}" for mm in header.spacing_mm)
    x, y, z = _ends(header)[0]
    return f"{shape} voxels of {spacing} mm from ({x:.1f}, {y:.1f}, {z:.1f})"
