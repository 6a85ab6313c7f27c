"""What a grid costs, and which stage refuses it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from runtime.files.names import size_text
from settings import ConfigError, Settings


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
