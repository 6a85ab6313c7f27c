"""What a condition that is made from its target knows of it, and samples keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def block_means(image: Tensor, factors: Sequence[int]) -> Tensor:
    """Average blocks of `factors` voxels of a (C, D, H, W) volume."""
    return F.avg_pool3d(image[None], tuple(factors), tuple(factors))[0]


def filled(image: Tensor, unknown: Tensor) -> Tensor:
    """Return a volume (C, D, H, W) whose known voxels go on smoothly where it is `unknown`, bool (D, H, W).

    There it has means of known voxels, interpolated from the finest grid that has any. If nothing is known, it is 0.
    """
    if not unknown.any() or unknown.all():
        return image.masked_fill(unknown, 0.0)
    d, h, w = unknown.shape
    size = ((d + 1) // 2, (h + 1) // 2, (w + 1) // 2)
    share = F.adaptive_avg_pool3d((~unknown)[None].float(), size)
    means = F.adaptive_avg_pool3d(image.masked_fill(unknown, 0.0), size) / share.clamp_min(torch.finfo().tiny)
    coarse = filled(means, share[0] == 0)
    finer = F.interpolate(coarse[None], size=image.shape[1:], mode="trilinear", align_corners=False)[0]
    return image.where(~unknown, finer)


@dataclass(frozen=True)
class KnownVoxels:
    """What is known of a volume: all but where `unknown`, bool (D, H, W), is True, or the means of blocks of `factors`.

    Without either nothing is.
    """

    unknown: Tensor | None = None
    factors: tuple[int, ...] = (1, 1, 1)

    def kept_in(self, sample: Tensor, known: Tensor) -> Tensor:
        """Return a sample (C, D, H, W) with what is known: `known` is the target, or the means of its blocks.

        In a hole, what the sample lacks around it goes on smoothly, so that no step is left at its border.
        """
        if self.unknown is not None:
            return (sample + filled(known - sample, self.unknown)).where(self.unknown, known)
        if max(self.factors) == 1:
            return sample
        means = block_means(known, self.factors) if known.shape == sample.shape else known
        missing = means - block_means(sample, self.factors)
        for axis, factor in enumerate(self.factors, start=1):
            missing = missing.repeat_interleave(factor, dim=axis)
        return sample + missing


NOTHING_KNOWN = KnownVoxels()
