"""Metrics of volumes against their references, and of sets of volumes.

PSNR, SSIM and mean absolute error run in slabs, so that large volumes need no full-size temporaries. In sparse volumes,
such as radar and occupancy grids, these reward a network that predicts nothing; IoU and Chamfer distance compare the
occupied voxels, those that differ from the background by more than a threshold, a share of the intensity range.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

import models  # noqa: F401  # first: it keeps MONAI's import short

# isort: split
import numpy as np
import torch
from monai.metrics.regression import SSIMMetric, compute_ms_ssim
from scipy.ndimage import distance_transform_edt
from torch import Tensor
from torch.nn import functional as F

from losses.terms import occupied

DATA_RANGE = 2.0  # volumes lie in [-1, 1]

# Wang, Simoncelli and Bovik 2003; with fewer scales, the first of these are normalised to sum to one.
SCALE_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
LARGEST_WINDOW = 11
SMALLEST_WINDOW = 3

_SLAB_VOXELS = 1 << 23  # SSIM holds about ten tensors of this size


def psnr(reconstruction: Tensor, image: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB of each volume in a batch with values in [-1, 1]."""
    error = _mean(lambda first, second: (first - second).square().flatten(1).mean(dim=1), reconstruction, image)
    return 10 * torch.log10(DATA_RANGE**2 / error.clamp_min(1e-12))


def absolute_error(reconstruction: Tensor, image: Tensor) -> Tensor:
    """Return the mean absolute error of each volume in a batch."""
    return _mean(lambda first, second: (first - second).abs().flatten(1).mean(dim=1), reconstruction, image)


def ssim(reconstruction: Tensor, image: Tensor) -> Tensor:
    """Return the mean structural similarity of each volume in a batch with values in [-1, 1].

    The window shrinks to fit the shortest axis.
    """
    smallest = min(image.shape[2:])
    window = min(LARGEST_WINDOW, smallest if smallest % 2 else smallest - 1)
    sigma = 1.5 * window / LARGEST_WINDOW
    metric = SSIMMetric(spatial_dims=3, data_range=DATA_RANGE, win_size=window, kernel_sigma=sigma)
    return _mean(lambda first, second: metric(first, second).flatten(), reconstruction, image, halo=window - 1)


def ms_ssim(first: Tensor, second: Tensor) -> Tensor:
    """Return the multi-scale structural similarity of each pair of volumes in two batches with values in [0, 1].

    The shortest axis determines the number of scales (up to five) and the window (11 down to 3 voxels): both are as
    large as it allows, but the window shrinks before the scales drop below three. An axis of one or two voxels is
    compared slice by slice.
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


def iou(reconstruction: Tensor, image: Tensor, threshold: float) -> Tensor:
    """Return the intersection over union of the occupied voxels of each volume in a batch; 1 if both are empty."""
    found, true = (occupied(volumes, image, threshold).flatten(1) for volumes in (reconstruction, image))
    both, either = (found & true).sum(1), (found | true).sum(1)
    return torch.where(either == 0, 1.0, both / either.clamp_min(1))


def chamfer(reconstruction: Tensor, image: Tensor, threshold: float) -> Tensor:
    """Return the Chamfer distance of each volume in a batch, in voxels: how far occupied voxels are from one another.

    It is the mean distance of an occupied voxel of one volume to the nearest one of the other, averaged over both
    directions and the channels. If only one of the two is empty, it is the diagonal of the grid.
    """
    found, true = (occupied(volumes, image, threshold).cpu().numpy() for volumes in (reconstruction, image))
    distances = [
        np.mean([_chamfer(a, b) for a, b in zip(one, other, strict=True)])
        for one, other in zip(found, true, strict=True)
    ]
    return torch.tensor(distances, dtype=torch.float64, device=image.device)


def _chamfer(first: np.ndarray, second: np.ndarray) -> float:
    if not first.any() or not second.any():
        return 0.0 if first.any() == second.any() else math.hypot(*first.shape)
    to_second, to_first = (distance_transform_edt(~grid) for grid in (second, first))
    return float(to_second[first].mean() + to_first[second].mean()) / 2


OCCUPANCY = {"iou": iou, "chamfer": chamfer}
"""The measures of occupied voxels by their names in metrics and results."""


def occupancy(found: Tensor, true: Tensor, threshold: float | None) -> dict[str, float]:
    """Return all measures of occupied voxels of a volume (C, D, H, W) in [-1, 1]; none without a threshold."""
    if threshold is None:
        return {}
    return {name: float(measure(found[None], true[None], threshold)) for name, measure in OCCUPANCY.items()}


def _scales_and_window(smallest: int) -> tuple[int, int]:
    for fewest in (3, 2, 1):
        for window in range(LARGEST_WINDOW, SMALLEST_WINDOW - 1, -2):
            # MONAI needs the volume to be larger than the window at every scale, including its extra halving.
            fits = [n for n in range(fewest, len(SCALE_WEIGHTS) + 1) if smallest // 2 ** (n - 1) > window]
            if fits:
                return max(fits), window
    return 1, SMALLEST_WINDOW


def _mean(measure: Callable[[Tensor, Tensor], Tensor], reconstruction: Tensor, image: Tensor, halo: int = 0) -> Tensor:
    """Return the mean of a measure over each volume in a batch, computed in slabs of rows.

    `halo` is how many more rows the measure reads than it returns values for.
    """
    num_rows = image.shape[2] - halo
    rows = max(1, _SLAB_VOXELS // image[:, :, 0].numel() - halo)
    total = torch.zeros((), device=image.device)
    for start in range(0, num_rows, rows):
        end = min(start + rows, num_rows)
        first, second = (volume[:, :, start : end + halo].float() for volume in (reconstruction, image))
        total = total + measure(first, second) * ((end - start) / num_rows)
    return total


SUMMARY_GRID = 16
"""Volumes are averaged down to at most this many voxels per axis before they are compared as vectors."""

MAX_PAIRS = 64

OCCUPIED = 0.05
"""Voxels above this value, in [0, 1], are not empty."""


def summary_vector(volume: Tensor) -> Tensor:
    """Return the block means of a volume as a vector; the blocks are coarse, so noise hardly affects distances."""
    depth, height, width = (min(axis, SUMMARY_GRID) for axis in volume.shape[1:])
    return F.adaptive_avg_pool3d(volume[None].float(), (depth, height, width)).flatten().cpu().double()


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
    # With more than 25 vectors, cdist would multiply matrices, and the rounding of that keeps equal vectors apart.
    distances = torch.cdist(vectors, others, compute_mode="donot_use_mm_for_euclid_dist")
    smallest = (distances / vectors.shape[1] ** 0.5).min(dim=1)
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
    laplacian = -6 * values
    for axis in (1, 2, 3):
        laplacian = laplacian + values.roll(1, axis) + values.roll(-1, axis)
    values, laplacian = (part[:, 1:-1, 1:-1, 1:-1] for part in (values, laplacian))
    inside = laplacian[values > OCCUPIED].double()
    inside = inside - inside.mean()
    variance = inside.square().mean()
    return float(inside.pow(4).mean() / variance.square()) if len(inside) and variance > 0 else math.nan
