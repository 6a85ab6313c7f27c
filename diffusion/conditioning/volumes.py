"""Makes the channels of a condition volume: degraded if it comes from its target, then brought to the latent grid."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from data import NETWORK_RANGE
from diffusion.normalisation import Normalisation
from settings.conditioning import DegradeSettings

Encode = Callable[[Tensor], Tensor]
"""Returns the mean latent (C, D, H, W) of a volume (C, D, H, W), on the host."""


def lowered(image: Tensor, factors: Sequence[int]) -> Tensor:
    """Average blocks of `factors` voxels of a (C, D, H, W) volume, and interpolate back to its grid.

    A file of the lower resolution gets to the network's grid by the same interpolation.
    """
    coarse = block_means(image, factors)[None]
    return F.interpolate(coarse, size=image.shape[1:], mode="trilinear", align_corners=False)[0]


def block_means(image: Tensor, factors: Sequence[int]) -> Tensor:
    """Average blocks of `factors` voxels of a (C, D, H, W) volume."""
    return F.avg_pool3d(image[None], tuple(factors), tuple(factors))[0]


def hole_mask(grid: Sequence[int], size: Sequence[int], seed: int, digest: str, variant: int) -> Tensor:
    """Return bool (D, H, W), True in a box whose place depends on the seed, the volume and the variant only."""
    mask = torch.zeros(tuple(grid), dtype=torch.bool)
    place = []
    for axis, (n, width) in enumerate(zip(grid, size, strict=True)):
        text = f"{seed}/hole/{digest}/{variant}/{axis}"
        start = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % (n - width + 1)
        place.append(slice(start, start + width))
    mask[tuple(place)] = True
    return mask


def degraded(
    image: Tensor, s: DegradeSettings, seed: int, digest: str, variant: int, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the condition that is made from a (C, D, H, W) volume, and bool (D, H, W), True where it is unknown.

    `mask` is given if masks say what is unknown.
    """
    if any(factor > 1 for factor in s.downsample):
        return lowered(image, s.downsample), None
    unknown = mask if mask is not None else hole_mask(image.shape[1:], s.box, seed, digest, variant)
    return without(image, unknown), unknown


def without(image: Tensor, unknown: Tensor) -> Tensor:
    """Return the volume with the lower end of the network's range wherever it is unknown."""
    return image.masked_fill(unknown, NETWORK_RANGE[0])


def joined_volume(image: Tensor, unknown: Tensor | None, encode: Encode | None, grid: Sequence[int]) -> Tensor:
    """Return the channels of a condition volume on the latent grid; the last is the share that is known."""
    channels = averaged(image, grid) if encode is None else encode(image)
    known = torch.ones(1, *grid) if unknown is None else averaged((~unknown)[None].float(), grid)
    return torch.cat([channels, known])


def normalised(channels: Tensor, normalisation: Normalisation) -> Tensor:
    """Return the channels of a condition volume normalised, but for the last, which says what is known."""
    return torch.cat([normalisation.apply(channels[:-1]), channels[-1:]])


def averaged(image: Tensor, grid: Sequence[int]) -> Tensor:
    """Average equal blocks of a (C, D, H, W) volume, one for each voxel of `grid`."""
    return block_means(image, [n // m for n, m in zip(image.shape[1:], grid, strict=True)])
