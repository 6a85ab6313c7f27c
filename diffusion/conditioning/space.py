"""Where a condition lies, and what one that is made from its target knows of it, which samples keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data.geometry import Geometry
from data.loading import on_file_grid


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


@dataclass(frozen=True)
class Space:
    """Where a condition from the command line lies, which its samples are written in: grid, affine, intensities.

    `lower` and `upper` are its intensities if its samples have the same, as they have if it is made from its target.
    Then `voxels` (C, X, Y, Z) are those of its file, and samples keep what is `known`, on the file's axes. With a hole,
    `on_grid` has what is known on the network's grid, and the condition there in [0, 1].
    """

    geometry: Geometry
    lower: tuple[float, ...] | None = None
    upper: tuple[float, ...] | None = None
    voxels: np.ndarray | None = None
    known: KnownVoxels = NOTHING_KNOWN
    on_grid: tuple[KnownVoxels, Tensor] | None = None

    def restored(self, unit: np.ndarray, lower: tuple[float, ...], upper: tuple[float, ...]) -> np.ndarray:
        """Return a sample (C, D, H, W) in [0, 1] on the file's grid; `lower` and `upper` are the training set's."""
        if self.on_grid is not None:
            known, image = self.on_grid
            unit = known.kept_in(torch.from_numpy(unit), image).clamp(0, 1).numpy()
        result = on_file_grid(unit * 2 - 1, self.geometry, self.lower or lower, self.upper or upper)
        if self.voxels is None:
            return result
        if self.known.unknown is not None:
            return np.where(self.known.unknown.numpy(), result, self.voxels)
        return self.known.kept_in(torch.from_numpy(result), torch.from_numpy(self.voxels)).numpy()

    def shown(
        self, restored: np.ndarray, lower: tuple[float, ...], upper: tuple[float, ...]
    ) -> tuple[Tensor, tuple[float, ...], tuple[int, ...] | None]:
        """Return the first channel of what `restored` returned for a picture, (D, H, W) in [0, 1], and its spacing.

        The third result is a voxel amid those that were unknown; None if there were none.
        """
        low, high = (
            np.float32((ends or of_training)[0]) for ends, of_training in ((self.lower, lower), (self.upper, upper))
        )
        unit = (self.geometry.oriented(restored)[0] - low) / np.maximum(high - low, np.finfo(np.float32).tiny)
        spacing_mm = np.linalg.norm(self.geometry.affine[:3, list(self.geometry.axes)], axis=0)
        at, unknown = None, self.known.unknown
        if unknown is not None and unknown.any():
            places = np.argwhere(self.geometry.oriented(unknown.numpy()[None])[0])
            distances = np.square(places - places.mean(axis=0)).sum(axis=1)
            at = tuple(places[distances.argmin()].tolist())
        return torch.from_numpy(unit.clip(0, 1)), tuple(spacing_mm.tolist()), at
