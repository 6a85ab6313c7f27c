"""Metrics of sets of volumes: maximum mean discrepancy, diversity and nearest neighbours.

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


def summary_vector(volume: Tensor) -> Tensor:
    """Return the block means of a volume as a vector; the blocks are coarse, so noise hardly affects distances."""
    depth, height, width = (min(axis, SUMMARY_GRID) for axis in volume.shape[1:])
    return F.adaptive_avg_pool3d(volume[None].float(), (depth, height, width)).flatten().cpu().double()


def maximum_mean_discrepancy(samples: Tensor, reference: Tensor) -> float:
    """Return the maximum mean discrepancy between two sets of vectors (N, F), each of at least two.

    This is the square root of the unbiased estimate, or 0 where the estimate is negative. The Gaussian kernels are
    scaled to the median distance within the reference, so values for one reference are comparable. Return NaN when
    that median is 0.
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
    """Return the mean MS-SSIM between different volumes of a set; 1 means that all are the same volume.

    At most `MAX_PAIRS` pairs are compared, spread evenly over all pairs.
    """
    pairs = list(itertools.combinations(range(len(volumes)), 2))
    assert pairs, "diversity needs at least two volumes"
    chosen = [pairs[number * len(pairs) // min(len(pairs), MAX_PAIRS)] for number in range(min(len(pairs), MAX_PAIRS))]
    return sum(float(ms_ssim(volumes[a][None], volumes[b][None])) for a, b in chosen) / len(chosen)


def nearest(vectors: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root-mean-square distance from each vector to the nearest of the others, and the index of that one."""
    distances = torch.cdist(vectors, others) / vectors.shape[1] ** 0.5
    smallest = distances.min(dim=1)
    return smallest.values, smallest.indices
