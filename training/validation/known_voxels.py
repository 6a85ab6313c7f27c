"""What a condition that is made from its target knows of it, and samples keep."""

from __future__ import annotations

from torch import Tensor

from diffusion.conditioning.volumes import block_means
from settings.conditioning import VolumeSettings


def with_known(sample: Tensor, target: Tensor, s: VolumeSettings, unknown: Tensor | None) -> Tensor:
    """Return a sample (C, D, H, W) with what its condition knows of the target, as scripts/sample.py writes it.

    That is everything outside a hole, where `unknown` (D, H, W) is False, or the means of blocks.
    """
    if not s.is_from_target:
        return sample
    if unknown is not None:
        return sample.where(unknown, target)
    factors = s.degrade.downsample
    missing = block_means(target - sample, factors)
    for axis, factor in enumerate(factors, start=1):
        missing = missing.repeat_interleave(factor, dim=axis)
    return sample + missing
