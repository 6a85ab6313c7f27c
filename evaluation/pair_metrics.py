"""Metrics of a volume against its reference: PSNR, SSIM, mean absolute error and MS-SSIM.

All but MS-SSIM run in slabs, so that large volumes need no full-size temporaries.
"""

from __future__ import annotations

from collections.abc import Callable

import models.monai_import  # noqa: F401  # first: it keeps MONAI's import short

# isort: split
import torch
from monai.metrics.regression import SSIMMetric, compute_ms_ssim
from torch import Tensor

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
