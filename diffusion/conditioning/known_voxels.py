"""What a condition that is made from its target knows of it, and samples keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F


def block_means(image: Tensor, factors: Sequence[int]) -> Tensor:
    """Average blocks of `factors` voxels of a (C, D, H, W) volume."""
    return F.avg_pool3d(image[None], tuple(factors), tuple(factors))[0]


@dataclass(frozen=True)
class KnownVoxels:
    """What is known of a volume: all but where `unknown`, bool (D, H, W), is True, or the means of blocks of `factors`.

    Without either nothing is.
    """

    unknown: Tensor | None = None
    factors: tuple[int, ...] = (1, 1, 1)

    def kept_in(self, sample: Tensor, known: Tensor) -> Tensor:
        """Return a sample (C, D, H, W) with what is known: `known` is the target, or the means of its blocks."""
        if self.unknown is not None:
            return sample.where(self.unknown, known)
        if max(self.factors) == 1:
            return sample
        means = block_means(known, self.factors) if known.shape == sample.shape else known
        missing = means - block_means(sample, self.factors)
        for axis, factor in enumerate(self.factors, start=1):
            missing = missing.repeat_interleave(factor, dim=axis)
        return sample + missing


NOTHING_KNOWN = KnownVoxels()
