"""Metrics of sets of volumes: maximum mean discrepancy, precision and recall, diversity and nearest neighbours.

Volumes are (C, D, H, W) with values in [0, 1].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from evaluation.pair_metrics import ms_ssim

SUMMARY_GRID = 16
"""Volumes are averaged down to at most this many voxels per axis before they are compared as vectors."""

BANDWIDTHS = (0.5, 1.0, 2.0)
"""Kernel widths, as multiples of the median distance between reference volumes."""

MAX_PAIRS = 64

NEIGHBOUR = 3
"""Precision and recall use the distance to this nearest neighbour, counted from 1."""


def summary_vector(volume: Tensor) -> Tensor:
    """Return the block means of a volume as a vector; the blocks are coarse, so noise hardly affects distances."""
    depth, height, width = (min(axis, SUMMARY_GRID) for axis in volume.shape[1:])
    return F.adaptive_avg_pool3d(volume[None].float(), (depth, height, width)).flatten().cpu().double()


class PrincipalComponents:
    """The directions in which a set of volumes varies most: maps a volume to its `number` largest components.

    All volumes are held in memory at once, so this is for small grids.
    """

    def __init__(self, volumes: Sequence[Tensor], number: int) -> None:
        vectors = torch.stack([volume.flatten() for volume in volumes]).double()
        self.mean = vectors.mean(dim=0)
        _, _, directions = torch.linalg.svd(vectors - self.mean, full_matrices=False)
        self.directions = directions[:number]

    def __call__(self, volume: Tensor) -> Tensor:
        """Return the components of one volume."""
        return self.directions @ (volume.flatten().double() - self.mean)


def maximum_mean_discrepancy(samples: Tensor, reference: Tensor) -> float:
    """Return the maximum mean discrepancy between two sets of vectors (N, F), each of at least two.

    This is the square root of the unbiased estimate, or 0 where the estimate is negative. The Gaussian kernels are
    scaled to the median distance within the reference, so values for one reference are comparable. Return NaN when
    that median is 0.
    """
    squared, _ = squared_discrepancy(samples, reference)
    return math.nan if math.isnan(squared) else math.sqrt(max(0.0, squared))


def squared_discrepancy(
    samples: Tensor, reference: Tensor, widths: Sequence[float] = BANDWIDTHS
) -> tuple[float, float]:
    """Return the unbiased estimate of the squared discrepancy, which may be negative, and its standard error.

    The kernel is the mean of Gaussians whose `widths` are multiples of the median distance within the reference. The
    error is the jackknife's over samples and over reference volumes; NaN for sets of two.
    """
    assert len(samples) > 1, f"MMD needs at least two samples, not {len(samples)}"
    assert len(reference) > 1, f"MMD needs at least two reference volumes, not {len(reference)}"
    typical = torch.pdist(reference).median()
    if typical == 0:
        return math.nan, math.nan

    def kernel(first: Tensor, second: Tensor) -> Tensor:
        squared = _distances(first, second).square()
        return torch.stack([torch.exp(-squared / (2 * (width * typical) ** 2)) for width in widths]).mean(dim=0)

    cross = kernel(samples, reference)

    def among(vectors: Tensor, across: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean kernel within a set, and the variance of the estimate when one member is left out."""
        number, matrix = len(vectors), kernel(vectors, vectors).fill_diagonal_(0)
        within = matrix.sum() / (number * (number - 1))
        rest = (matrix.sum() - 2 * matrix.sum(dim=1)) / ((number - 1) * (number - 2))
        left_out = rest - 2 * (across.sum() - across.sum(dim=1)) / ((number - 1) * across.shape[1])
        return within, (number - 1) * left_out.var(correction=0)

    of_samples, variance = among(samples, cross)
    of_reference, other_variance = among(reference, cross.T)
    return float(of_samples + of_reference - 2 * cross.mean()), float((variance + other_variance).sqrt())


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


def _distances(first: Tensor, second: Tensor) -> Tensor:
    """Return the distances between all pairs of vectors; equal vectors are exactly 0 apart."""
    # With more than 25 vectors, cdist would multiply matrices, and the rounding of that keeps equal vectors apart.
    return torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")
