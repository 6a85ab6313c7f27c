"""Suggests a grid that suits the volumes and that both stages accept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from data.geometry import geometry_of
from data.reading import VolumeFacts
from settings import ConfigError, Settings
from settings.rules import nearest_multiples
from storage.names import size_text


def suggested_grid(facts: Sequence[VolumeFacts], settings: Settings) -> tuple[int, ...] | None:
    """Return the median size of the volumes, rounded to what both stages accept, or None if nothing near it is.

    It is the median after reorientation to RAS and `data.spacing`.
    """
    sizes = np.median([geometry_of(fact.header, settings.data).spaced_shape for fact in facts], axis=0)
    steps = [settings.ldm.unet.downsampling * factor for factor in settings.autoencoder.downsampling]
    nearest = nearest_multiples(sizes.tolist(), steps)
    for more in range(4):
        grid = tuple(axis + more * step for axis, step in zip(nearest, steps, strict=True))
        if not stage_problems(settings, grid):
            return grid
    return None


def stage_problems(settings: Settings, grid: Sequence[int]) -> list[str]:
    """Return what the settings refuse about a grid."""
    try:
        settings.with_overrides({"data.voxel_size": list(grid)})
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def cost_text(grid: Sequence[int], settings: Settings, number: int) -> str:
    """Return what a grid costs compared with the one that is set."""
    ratio = math.prod(grid) / math.prod(settings.data.voxel_size)
    disk = 4 * settings.autoencoder.in_channels * math.prod(grid) * number
    return (
        f"{ratio:.3g} times the voxels of data.voxel_size, and about that much of its memory and time; "
        f"{size_text(disk)} of prepared volumes"
    )
