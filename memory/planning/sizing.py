"""What the number and the size of the volumes allow: widths, batches, steps. Never imports torch.

The limits are rules of thumb; what was measured is in docs/recipe.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memory.planning.fingerprint import Fingerprint
from memory.planning.layout import Layout
from runtime.files.names import counted

SMALL_SET = 50
"""Sets below this size get augmentation and a smaller network, and samples may be copies."""
FULL_PRECISION_VOXELS = 400_000
"""Volumes up to this size train in full precision: they need little memory anyway."""

WIDTHS = (8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64)
"""Channels of the autoencoder's highest resolution."""
UNET_WIDTHS = (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)
LEAST_WIDTH = 16

FEW_VOXELS = 2e7
"""Sets with fewer voxels in all volumes together get the smallest networks, and small batches for more updates."""

_BY_VOXELS = ((FEW_VOXELS, 16), (5e7, 32), (3e8, 48), (math.inf, 64))
_UNET_BY_NUMBER = ((SMALL_SET, 48), (200, 128), (1000, 160), (5000, 192), (math.inf, 256))
_UNET_BY_LATENTS = ((2e6, 32), (4e6, 64), (1e7, 96), (math.inf, 256))


@dataclass(frozen=True)
class Sizing:
    """Limits for both networks, and the length of both stages.

    `why_width` and `why_unet_width` say what sets the limit, in words that follow "because".
    """

    width: int
    why_width: str
    res_blocks: int
    batch: int
    passes: int
    unet_width: int
    why_unet_width: str
    unet_batch: int
    unet_passes: int
    is_small: bool
    full_precision: bool

    def steps(self, number: int, per_update: int, parts: float = 1.0) -> int:
        """Return the updates of stage 1; `parts`: how many patches make a volume."""
        return _steps(self.passes * min(parts, 8.0), number, per_update, 4_000, 60_000)

    def unet_steps(self, number: int, per_update: int) -> int:
        """Return the updates of stage 2."""
        return _steps(self.unet_passes, number, per_update, 10_000, 150_000)


def sizing_of(fingerprint: Fingerprint, layout: Layout) -> Sizing:
    """Return what a set on a grid allows."""
    number = fingerprint.number
    is_small = number < SMALL_SET
    voxels, latents = number * layout.voxels, number * math.prod(layout.latent)
    width = _limit(_BY_VOXELS, voxels)
    why = f"the set has {_count(voxels)} voxels on this grid ({counted(number, 'volume')})"
    if is_small and width > 24:
        width, why = 24, f"the set is small ({counted(number, 'volume')})"
    by_number, by_latents = _limit(_UNET_BY_NUMBER, number), _limit(_UNET_BY_LATENTS, latents)
    why_unet = f"the set has {counted(number, 'volume')}"
    if by_latents < by_number:
        why_unet = f"the latents of the set have {_count(latents)} voxels"
    return Sizing(
        width=width,
        why_width=why,
        res_blocks=1 if voxels < FEW_VOXELS else 2,
        batch=2 if is_small or voxels < FEW_VOXELS else 4,
        passes=200,
        unet_width=min(by_number, by_latents),
        why_unet_width=why_unet,
        unet_batch=4 if is_small else 8 if number < 2000 else 16,
        unet_passes=500,
        is_small=is_small,
        full_precision=layout.voxels <= FULL_PRECISION_VOXELS,
    )


def learning_rate(width: int, first: float, least: float) -> float:
    """Return a rate inversely proportional to the width, to one digit; `first` is that of 16 channels."""
    rate = max(least, min(first, first * 16 / width))
    digits = -math.floor(math.log10(rate))
    return round(rate, digits + 1)


def _limit(table: tuple[tuple[float, int], ...], value: float) -> int:
    return next(limit for below, limit in table if value < below)


def _steps(passes: float, number: int, per_update: int, least: int, most: int) -> int:
    steps = min(most, max(least, passes * number / per_update))
    return round(steps / 1000) * 1000


def _count(number: int) -> str:
    if number < 1e6:
        return f"{number:,}"
    return f"{number / 1e6:.1f} million" if number < 1e7 else f"{number / 1e6:,.0f} million"
