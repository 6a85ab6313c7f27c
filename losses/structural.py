"""A 3D perceptual term that needs no weights: structure and gradients compared at several scales.

Each scale has two similarities, which are 1 for equal volumes:

- the contrast-structure part of SSIM (Wang et al. 2003), (2 cov(x, y) + c) / (var x + var y + c), in windows of six
  voxels;
- the same ratio for the intensity gradients, (2 <grad x, grad y> + c) / (|grad x|^2 + |grad y|^2 + c), averaged over
  blocks of two voxels before the division. It falls if an edge is lost (blur), invented (noise) or rotated.

Local means are compared at the coarsest scale only, as in multi-scale SSIM, but by their difference: SSIM's ratio is
0.5 for an error of a tenth of the range in black background, which is most of a medical volume. Similarities are
averaged, not multiplied with fractional exponents, whose gradient is NaN or infinite where one is negative or zero.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from losses.pieces import FrozenTerm, mean_over_volumes

NUM_SCALES = 4
# An axis is halved only while at least this many voxels remain.
SHORTEST_AXIS = 4
# SSIM's constant for intensities that span 2: (0.03 * 2)^2.
CONTRAST_FLOOR = 3.6e-3
# A local mean that is off by 0.3, a seventh of the range, has a similarity of about a half.
LUMINANCE_FLOOR = 0.1


class StructuralDistance(FrozenTerm):
    """One minus the mean similarity over scales, volumes and channels: 0 for equal volumes, at most 2."""

    def forward(self, reconstruction: Tensor, target: Tensor, step: int) -> Tensor:
        """Return the mean distance. `step` has no effect, because the whole volume is compared."""
        return mean_over_volumes(reconstruction, target, structural_distance)


def structural_distance(volumes: Tensor, wanted: Tensor) -> Tensor:
    """Return the distance of each pair of one-channel volumes (n, depth, height, width) of any size."""
    x, y = volumes.unsqueeze(1), wanted.unsqueeze(1)
    similarities = []
    for scale in range(NUM_SCALES):
        factor = tuple(2 if size >= 2 * SHORTEST_AXIS else 1 for size in x.shape[2:])
        is_last = scale == NUM_SCALES - 1 or max(factor) == 1
        similarities.append(_gradient_similarity(x, y, factor))
        similarities.append(_contrast_similarity(x, y, factor))
        x, y = F.avg_pool3d(x, factor), F.avg_pool3d(y, factor)
        if is_last:
            similarities.append(_mean(LUMINANCE_FLOOR / ((x - y).square() + LUMINANCE_FLOOR)))
            break
    return 1 - torch.stack(similarities).mean(dim=0)


def _contrast_similarity(x: Tensor, y: Tensor, factor: Sequence[int]) -> Tensor:
    # Variances do not depend on a common offset, and without it the differences below lose less precision.
    offset = y.mean(dim=(1, 2, 3, 4), keepdim=True)
    x, y = x - offset, y - offset
    mean_x, mean_y = _window(x, factor), _window(y, factor)
    # Rounding can make a variance negative.
    var_x = (_window(x.square(), factor) - mean_x.square()).clamp_min(0)
    var_y = (_window(y.square(), factor) - mean_y.square()).clamp_min(0)
    covariance = _window(x * y, factor) - mean_x * mean_y
    return _mean((2 * covariance + CONTRAST_FLOOR) / (var_x + var_y + CONTRAST_FLOOR))


def _gradient_similarity(x: Tensor, y: Tensor, factor: Sequence[int]) -> Tensor:
    product = torch.zeros_like(y)
    energy = torch.zeros_like(y)
    for axis in (2, 3, 4):
        # The last voxel has no neighbour, so its difference is 0 in both volumes.
        slope_x = torch.diff(x, dim=axis, append=x.narrow(axis, x.shape[axis] - 1, 1))
        slope_y = torch.diff(y, dim=axis, append=y.narrow(axis, y.shape[axis] - 1, 1))
        product = product + slope_x * slope_y
        energy = energy + slope_x.square() + slope_y.square()
    product, energy = F.avg_pool3d(product, tuple(factor)), F.avg_pool3d(energy, tuple(factor))
    return _mean((2 * product + CONTRAST_FLOOR) / (energy + CONTRAST_FLOOR))


def _window(x: Tensor, factor: Sequence[int]) -> Tensor:
    """Return means over windows of six voxels, two apart; averaging blocks of two first saves most of the work."""
    blocks = F.avg_pool3d(x, tuple(factor))
    return F.avg_pool3d(blocks, tuple(min(3, size) for size in blocks.shape[2:]), stride=1)


def _mean(similarity: Tensor) -> Tensor:
    return similarity.mean(dim=(1, 2, 3, 4))
