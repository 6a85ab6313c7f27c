"""Suggests the grid of a plan for the networks of a config. Never imports torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from data.overview import stage_problems
from memory.planning.fingerprint import Fingerprint
from memory.planning.layout import covered_extent, layouts
from settings import Settings

Values = dict[str, Any]
MOST_ENLARGED = 3
"""By how many steps a grid is made larger that a stage refuses as too small."""


def suggested_values(found: Fingerprint, settings: Settings) -> Values | None:
    """Return the keys by which a plan with these networks, and memory for any grid, brings the volumes to a grid.

    None if both stages refuse that grid and those a little larger.
    """
    networks, unet = settings.autoencoder, settings.ldm.unet
    extent = replace(covered_extent(found), strides=networks.level_strides, unet_levels=len(unet.num_channels))
    if settings.data.spacing is not None and found.has_spacing:
        extent = replace(extent, spacing_mm=tuple(settings.data.spacing))
    layout = layouts(extent)[-1]
    levels = 1 if layout.pads_latents else unet.downsampling
    for more in range(MOST_ENLARGED + 1):
        grid = [axis + more * levels * step for axis, step in zip(layout.grid, networks.downsampling, strict=True)]
        values: Values = {"data.voxel_size": grid, "data.resize": extent.resize}
        if extent.resize == "crop_or_pad":
            values["data.spacing"] = layout.stated_spacing
        if not stage_problems(settings.with_overrides(values), grid):
            return values
    return None
