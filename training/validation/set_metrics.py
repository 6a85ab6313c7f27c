"""Metrics of sets of volumes: precision and recall, diversity and nearest neighbours.

Volumes are (C, D, H, W) with values in [0, 1].
"""

from __future__ import annotations

import itertools
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


def _distances(first: Tensor, second: Tensor) -> Tensor:
    """Return the distances between all pairs of vectors; equal vectors are exactly 0 apart."""
    # With more than 25 vectors, cdist would multiply matrices, and the rounding of that keeps equal vectors apart.
    return torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")
