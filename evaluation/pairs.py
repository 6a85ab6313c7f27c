"""How close a reconstruction is to its volume: PSNR, SSIM and mean absolute error, in slabs where volumes are large."""

from __future__ import annotations

from collections.abc import Callable

import models.monai_import  # noqa: F401  # first: it keeps MONAI's import short

# isort: split
import torch
from monai.metrics.regression import SSIMMetric
from torch import Tensor

DATA_RANGE = 2.0  # volumes lie in [-1, 1]


_WINDOW = 11


_SLAB_VOXELS = 1 << 23  # SSIM holds about ten tensors of this size


def psnr(reconstruction: Tensor, image: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB of each volume in a batch."""
    error = _mean(lambda first, second: (first - second).square().flatten(1).mean(dim=1), reconstruction, image)
    return 10 * torch.log10(DATA_RANGE**2 / error.clamp_min(1e-12))


def absolute_error(reconstruction: Tensor, image: Tensor) -> Tensor:
    """Return the mean absolute error of each volume in a batch."""
    return _mean(lambda first, second: (first - second).abs().flatten(1).mean(dim=1), reconstruction, image)


def ssim(reconstruction: Tensor, image: Tensor) -> Tensor:
    """Return the mean structural similarity of each volume in a batch; thin axes get a smaller window."""
    smallest = min(image.shape[2:])
    window = min(_WINDOW, smallest if smallest % 2 else smallest - 1)
    metric = SSIMMetric(spatial_dims=3, data_range=DATA_RANGE, win_size=window, kernel_sigma=1.5 * window / _WINDOW)
    return _mean(lambda first, second: metric(first, second).flatten(), reconstruction, image, halo=window - 1)


def _mean(measure: Callable[[Tensor, Tensor], Tensor], reconstruction: Tensor, image: Tensor, halo: int = 0) -> Tensor:
    """Return the mean of a measure over each volume in a batch, from slabs of rows: large volumes need no copies.

    `halo` is how many rows more than it returns values for the measure needs.
    """
    num_rows = image.shape[2] - halo
    rows = max(1, _SLAB_VOXELS // image[:, :, 0].numel() - halo)
    total = torch.zeros((), device=image.device)
    for start in range(0, num_rows, rows):
        end = min(start + rows, num_rows)
        first, second = (volume[:, :, start : end + halo].float() for volume in (reconstruction, image))
        total = total + measure(first, second) * ((end - start) / num_rows)
    return total
