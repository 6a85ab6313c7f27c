"""Which voxels of mostly empty volumes are occupied, such as the echoes of a radar."""

import torch
from torch import Tensor

LOWER_END = -1.0
SAME = 1e-3
"""Values that differ by less are equal: background that was resampled is rounded."""
MOST_SAMPLES = 1 << 16


def occupied(volumes: Tensor, true: Tensor, threshold: float) -> Tensor:
    """Return which voxels of (B, C, D, H, W) in [-1, 1] differ from the background of `true` by more than `threshold`.

    The threshold is a share of the intensity range.
    """
    return (volumes - background(true)).abs() > 2 * threshold


def background(volumes: Tensor) -> Tensor:
    """Return the background of each channel (B, C, 1, 1, 1): what at least half of its voxels equal.

    A channel without such a value, as in a patch full of tissue, has the lower end of the range as its background. A
    signed channel has it inside its range: a velocity is 0 where nothing was seen.
    """
    voxels = volumes.detach().flatten(2)
    # Some voxels tell it. An odd stride does not fall on the same columns of a grid again and again.
    some = voxels[..., :: (voxels.shape[-1] // MOST_SAMPLES) | 1]
    middle = some.sort(dim=-1).values[..., some.shape[-1] // 2 :][..., :1]
    is_common = ((some - middle).abs() < SAME).float().mean(dim=-1, keepdim=True) >= 0.5
    return torch.where(is_common, middle, LOWER_END)[..., None, None]
