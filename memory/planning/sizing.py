"""What the number and the size of the volumes allow: widths, batches, steps. Never imports torch.

The limits are rules of thumb; what was measured is in docs/recipe.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memory.planning.fingerprint import SMALL_SET, Fingerprint
from memory.planning.layout import Layout
from memory.predict.prediction import Stage
from runtime.files.names import counted

FULL_PRECISION_VOXELS = 400_000
"""Volumes up to this size train in full precision: they need little memory anyway."""

WIDTHS = (8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64)
"""Channels of the autoencoder's highest resolution."""
UNET_WIDTHS = (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)
LEAST_WIDTH = 16
"""Narrower networks are chosen only for sets that support no more, or to keep to the hours."""

FEW_VOXELS = 2e7
"""Sets with fewer voxels in all volumes together get the smallest networks, and small batches for more updates."""

_BY_VOXELS = ((FEW_VOXELS, 16), (5e7, 32), (3e8, 48), (math.inf, 64))
_UNET_BY_NUMBER = ((SMALL_SET, 48), (200, 128), (1000, 160), (5000, 192), (math.inf, 256))
_UNET_BY_LATENTS = ((2e6, 32), (4e6, 64), (1e7, 96), (math.inf, 256))


@dataclass(frozen=True)
class StageSizing:
    """Limits for the network of a stage, and its length: passes over the set, and the range of its steps.

    `why_width` says what sets the limit, in words that follow "because"; `widths`: those to choose from.
    """

    width: int
    why_width: str
    batch: int
    passes: int
    steps_range: tuple[int, int]
    widths: tuple[int, ...]

    @property
    def searched_widths(self) -> list[int]:
        """Return the widths to choose from by memory."""
        return [width for width in self.widths if min(LEAST_WIDTH, self.width) <= width <= self.width]

    def narrower(self, width: int) -> int | None:
        """Return the next width below another, None if there is none."""
        return max((other for other in self.widths if other < width), default=None)

    def steps(self, number: int, per_update: int, parts: float = 1.0) -> int:
        """Return the updates for so many volumes; `parts`: how many patches make a volume."""
        least, most = self.steps_range
        steps = min(most, max(least, self.passes * min(parts, 8.0) * number / per_update))
        return round(steps / 1000) * 1000


@dataclass(frozen=True)
class Sizing:
    """The limits of both stages, and what else follows from the size of a set."""

    stages: dict[Stage, StageSizing]
    res_blocks: int
    full_precision: bool


def sizing_of(fingerprint: Fingerprint, layout: Layout) -> Sizing:
    """Return what a set on a grid allows."""
    number = fingerprint.number
    is_small = fingerprint.is_small
    voxels, latents = number * layout.voxels, number * math.prod(layout.latent)
    width = _limit(_BY_VOXELS, voxels)
    why = f"the set has {_count(voxels)} voxels on this grid ({counted(number, 'volume')})"
    if is_small and width > 24:
        width, why = 24, f"the set is small ({counted(number, 'volume')})"
    by_number, by_latents = _limit(_UNET_BY_NUMBER, number), _limit(_UNET_BY_LATENTS, latents)
    why_unet = f"the set has {counted(number, 'volume')}"
    if by_latents < by_number:
        why_unet = f"the latents of the set have {_count(latents)} voxels"
    batch = 2 if is_small or voxels < FEW_VOXELS else 4
    unet_width, unet_batch = min(by_number, by_latents), 4 if is_small else 8 if number < 2000 else 16
    return Sizing(
        {
            "autoencoder": StageSizing(width, why, batch, 200, (4_000, 60_000), WIDTHS),
            "ldm": StageSizing(unet_width, why_unet, unet_batch, 500, (10_000, 150_000), UNET_WIDTHS),
        },
        res_blocks=1 if voxels < FEW_VOXELS else 2,
        full_precision=layout.voxels <= FULL_PRECISION_VOXELS,
    )


def learning_rate(width: int, first: float, least: float) -> float:
    """Return a rate inversely proportional to the width, to one digit; `first` is that of 16 channels."""
    rate = max(least, min(first, first * 16 / width))
    digits = -math.floor(math.log10(rate))
    return round(rate, digits + 1)


def _limit(table: tuple[tuple[float, int], ...], value: float) -> int:
    return next(limit for below, limit in table if value < below)


def _count(number: int) -> str:
    if number < 1e6:
        return f"{number:,}"
    return f"{number / 1e6:.1f} million" if number < 1e7 else f"{number / 1e6:,.0f} million"
