"""How near sets of volumes are to each other: MS-SSIM, maximum mean discrepancy, diversity, nearest neighbours.

Volumes are (C, D, H, W) or batches of them, with values in [0, 1].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import models.monai_import  # noqa: F401  # first: it keeps MONAI's import short

# isort: split
import torch
from monai.metrics.regression import compute_ms_ssim
from torch import Tensor
from torch.nn import functional as F

# Wang, Simoncelli and Bovik 2003; fewer scales use the first of these, brought to a sum of one.
SCALE_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
LARGEST_WINDOW = 11
SMALLEST_WINDOW = 3

SUMMARY_GRID = 16
"""Volumes are averaged down to at most so many voxels an axis before they are compared as vectors."""

BANDWIDTHS = (0.5, 1.0, 2.0)
"""Widths of the kernel in units of the reference volumes' median distance."""

MAX_PAIRS = 64


def ms_ssim(first: Tensor, second: Tensor) -> Tensor:
    """Return the multi-scale structural similarity of each pair of volumes in two batches.

    The number of scales (up to five) and the window (11 down to 3 voxels) are the largest that the thinnest axis has
    room for, at least three scales being worth a smaller window. Along an axis of one or two voxels nothing is
    compared but its slices, one by one.
    """
    for axis in (2, 3, 4):
        if first.shape[axis] == 1:  # MONAI halves the volume after the last scale too
            first, second = (volume.repeat_interleave(2, axis) for volume in (first, second))
    scales, window = _scales_and_window(min(first.shape[2:]))
    windows = [window if axis >= window else 1 for axis in first.shape[2:]]
    weights = [weight / sum(SCALE_WEIGHTS[:scales]) for weight in SCALE_WEIGHTS[:scales]]
    sigma = 1.5 * window / LARGEST_WINDOW
    similarity = compute_ms_ssim(
        first.float(), second.float(), 3, 1.0, kernel_size=windows, kernel_sigma=[sigma] * 3, weights=weights
    )
    return similarity.flatten()


def _scales_and_window(smallest: int) -> tuple[int, int]:
    for fewest in (3, 2, 1):
        for window in range(LARGEST_WINDOW, SMALLEST_WINDOW - 1, -2):
            # MONAI wants the volume larger than the window at every scale, with room for its own halving.
            fits = [n for n in range(fewest, len(SCALE_WEIGHTS) + 1) if smallest // 2 ** (n - 1) > window]
            if fits:
                return max(fits), window
    return 1, SMALLEST_WINDOW


def summary_vector(volume: Tensor) -> Tensor:
    """Return a volume as a vector of local means: coarse enough that noise does not decide distances."""
    depth, height, width = (min(axis, SUMMARY_GRID) for axis in volume.shape[1:])
    return F.adaptive_avg_pool3d(volume[None].float(), (depth, height, width)).flatten().cpu().double()


def maximum_mean_discrepancy(samples: Tensor, reference: Tensor) -> float:
    """Return the maximum mean discrepancy between two sets of vectors (N, F), each of at least two.

    The square root of the unbiased estimate, 0 where that is negative; Gaussian kernels as wide as the reference
    is spread, so that every set compared with one reference is measured by one yardstick. NaN when there is none: the
    median distance in the reference is 0.
    """
    assert len(samples) > 1, f"MMD needs at least two samples, not {len(samples)}"
    assert len(reference) > 1, f"MMD needs at least two reference volumes, not {len(reference)}"
    typical = torch.pdist(reference).median()
    if typical == 0:
        return math.nan

    def kernel(first: Tensor, second: Tensor) -> Tensor:
        squared = torch.cdist(first, second).square()
        return torch.stack([torch.exp(-squared / (2 * (width * typical) ** 2)) for width in BANDWIDTHS]).mean(dim=0)

    def among(vectors: Tensor) -> Tensor:
        matrix = kernel(vectors, vectors)
        return (matrix.sum() - matrix.trace()) / (len(vectors) * (len(vectors) - 1))

    squared = among(samples) + among(reference) - 2 * kernel(samples, reference).mean()
    return float(squared.clamp_min(0).sqrt())


def mean_pairwise_ms_ssim(volumes: Sequence[Tensor]) -> float:
    """Return the mean MS-SSIM between different volumes of a set: 1 would be one volume drawn again and again.

    Of more than `MAX_PAIRS` pairs an even selection is taken.
    """
    pairs = list(itertools.combinations(range(len(volumes)), 2))
    assert pairs, "diversity needs at least two volumes"
    chosen = [pairs[number * len(pairs) // min(len(pairs), MAX_PAIRS)] for number in range(min(len(pairs), MAX_PAIRS))]
    return sum(float(ms_ssim(volumes[a][None], volumes[b][None])) for a, b in chosen) / len(chosen)


def nearest(vectors: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each vector the root-mean-square distance to the nearest of the others, and which one it is."""
    distances = torch.cdist(vectors, others) / vectors.shape[1] ** 0.5
    smallest = distances.min(dim=1)
    return smallest.values, smallest.indices
