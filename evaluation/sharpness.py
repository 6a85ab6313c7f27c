"""Sharpness of volumes: gradient magnitudes, and power spectra of slices in all three planes.

Volumes are (C, D, H, W) with values in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evaluation.fid import PLANES

NUM_BANDS = 4
"""Bands of equal width from 0 to 0.5 cycles per voxel; the last holds the finest detail that the grid can show."""

OCCUPIED = 0.05
"""Voxels above this value, in [0, 1], are not empty."""

_SLICES_AT_ONCE = 16


def sharpness_of(volume: Tensor) -> Tensor:
    """Return the mean length of the intensity gradient, then the powers of all bands, plane by plane."""
    return torch.cat([gradient_magnitude(volume)[None], band_powers(volume).flatten()])


def gradient_magnitude(volume: Tensor) -> Tensor:
    """Return the mean length of the intensity gradient; an axis of one voxel has none."""
    squared = torch.zeros_like(volume, dtype=torch.float32)
    for axis in (1, 2, 3):
        if volume.shape[axis] > 1:
            squared += torch.gradient(volume.float(), dim=axis)[0].square()
    return squared.sqrt().mean(dtype=torch.float64).cpu()


def laplacian_kurtosis(volume: Tensor) -> float:
    """Return the kurtosis of the Laplacian where the volume is not empty, 3 for a Gaussian field; higher: clear edges.

    Blends of volumes have soft edges everywhere, real volumes have few sharp ones. NaN for a constant volume.
    """
    values = volume.float()
    inner = values[:, 1:-1, 1:-1, 1:-1]
    laplacian = -6 * inner
    for axis in (1, 2, 3):
        other = [slice(1, -1) if place in (1, 2, 3) and place != axis else slice(None) for place in range(4)]
        window = values[tuple(other)]
        laplacian = laplacian + window.narrow(axis, 0, inner.shape[axis]) + window.narrow(axis, 2, inner.shape[axis])
    inside = laplacian[inner > OCCUPIED].double()
    inside = inside - inside.mean()
    variance = inside.square().mean()
    return float(inside.pow(4).mean() / variance.square()) if len(inside) and variance > 0 else math.nan


def band_powers(volume: Tensor) -> Tensor:
    """Return the mean power of slices (3 planes, NUM_BANDS) by spatial frequency.

    The mean of a slice is left out, and so are frequencies above 0.5 cycles per voxel, in the corners of the spectrum.
    Bands that a plane is too small to have are NaN.
    """
    rows = []
    for plane in (1, 2, 3):
        slices = volume.float().movedim(plane, 1).flatten(0, 1)
        # In parts, because the transform of a whole volume would be a complex copy of it.
        power = sum(torch.fft.fft2(part).abs().square().sum(dim=0) for part in slices.split(_SLICES_AT_ONCE))
        assert isinstance(power, Tensor), "a volume has slices"
        frequencies = [torch.fft.fftfreq(size, device=power.device) for size in power.shape]
        radius = torch.linalg.vector_norm(torch.stack(torch.meshgrid(*frequencies, indexing="ij")), dim=0)
        # A frequency at the end of a band belongs to it, even if rounding moves it a little beyond.
        band = (radius * 2 * NUM_BANDS - 1e-5).ceil().long() - 1
        rows.append(torch.stack([power[band == number].double().mean() for number in range(NUM_BANDS)]).cpu())
        rows[-1] /= slices.numel()
    return torch.stack(rows)


def compare_sharpness(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> dict[str, Any]:
    """Return the mean gradient magnitude and band powers of one set relative to another; below 1 is softer.

    Both sets hold one result of `sharpness_of` per volume. NaN where the volumes in `wanted` have no such detail.
    """
    gradient, *powers = (torch.stack([*found]).mean(dim=0) / torch.stack([*wanted]).mean(dim=0)).tolist()
    finite = [value if math.isfinite(value) else math.nan for value in powers]
    by_plane = {plane: finite[place * NUM_BANDS :][:NUM_BANDS] for place, plane in enumerate(PLANES)}
    return {"gradient_magnitude": gradient if math.isfinite(gradient) else math.nan, "spectrum": by_plane}
