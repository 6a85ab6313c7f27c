"""Metrics of sets of volumes: precision and recall, diversity, nearest neighbours and sharpness.

Volumes are (C, D, H, W) with values in [0, 1].
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from training.validation.pair_metrics import ms_ssim

SUMMARY_GRID = 16
"""Volumes are averaged down to at most this many voxels per axis before they are compared as vectors."""

MAX_PAIRS = 64

NEIGHBOUR = 3
"""Precision and recall use the distance to this nearest neighbour, counted from 1."""

OCCUPIED = 0.05
"""Voxels above this value, in [0, 1], are not empty."""


def summary_vector(volume: Tensor) -> Tensor:
    """Return the block means of a volume as a vector; the blocks are coarse, so noise hardly affects distances."""
    depth, height, width = (min(axis, SUMMARY_GRID) for axis in volume.shape[1:])
    return F.adaptive_avg_pool3d(volume[None].float(), (depth, height, width)).flatten().cpu().double()


def precision_and_recall(samples: Tensor, reference: Tensor) -> tuple[float, float]:
    """Return the share of samples that lie within the reference, and of reference vectors that lie within the samples.

    A vector lies within a set if it is no further from one of its members than that member's third nearest neighbour in
    the set (Kynkäänniemi et al. 2019); sets of fewer than four use the furthest.
    """

    def share_inside(vectors: Tensor, others: Tensor) -> float:
        nearest_first = _distances(others, others).sort(dim=1).values
        radius = nearest_first[:, min(NEIGHBOUR, len(others) - 1)]
        return float((_distances(vectors, others) <= radius).any(dim=1).double().mean())

    return share_inside(samples, reference), share_inside(reference, samples)


def mean_pairwise_ms_ssim(volumes: Sequence[Tensor]) -> float:
    """Return the mean MS-SSIM between different volumes of a set; 1 means that all are the same volume.

    At most `MAX_PAIRS` pairs are compared, spread evenly over all pairs.
    """
    pairs = list(itertools.combinations(range(len(volumes)), 2))
    assert pairs, "diversity needs at least two volumes"
    chosen = [pairs[number * len(pairs) // min(len(pairs), MAX_PAIRS)] for number in range(min(len(pairs), MAX_PAIRS))]
    return sum(float(ms_ssim(volumes[a][None], volumes[b][None])) for a, b in chosen) / len(chosen)


def nearest(vectors: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root-mean-square distance from each vector to the nearest of the others, and its index."""
    distances = _distances(vectors, others) / vectors.shape[1] ** 0.5
    smallest = distances.min(dim=1)
    return smallest.values, smallest.indices


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


def _distances(first: Tensor, second: Tensor) -> Tensor:
    """Return the distances between all pairs of vectors; equal vectors are exactly 0 apart."""
    # With more than 25 vectors, cdist would multiply matrices, and the rounding of that keeps equal vectors apart.
    return torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")
