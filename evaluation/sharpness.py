"""Sharpness of volumes (C, D, H, W) with values in [0, 1]: gradient magnitudes, and how clear edges are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

OCCUPIED = 0.05
"""Voxels above this value, in [0, 1], are not empty."""


def gradient_magnitude(volume: Tensor) -> float:
    """Return the mean length of the intensity gradient; an axis of one voxel has none."""
    squared = torch.zeros_like(volume, dtype=torch.float32)
    for axis in (1, 2, 3):
        if volume.shape[axis] > 1:
            squared += torch.gradient(volume.float(), dim=axis)[0].square()
    return float(squared.sqrt().mean(dtype=torch.float64))


def compare_sharpness(volumes: Sequence[float], real: Sequence[float]) -> dict[str, float]:
    """Return the mean gradient magnitude relative to that of real volumes; below 1 is softer."""
    wanted = statistics.fmean(real)
    return {"gradient_magnitude": statistics.fmean(volumes) / wanted if wanted > 0 else math.nan}


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
