"""From sizes and spacings to a grid, and to the strides that lead from it to a latent. Never imports torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data.overview import stage_problems
from memory.planning.fingerprint import Fingerprint
from settings import Settings
from settings.section import LARGEST_AXIS

Grid = tuple[int, ...]
Strides = tuple[tuple[int, ...], ...]

ALIKE = 1.15
"""Fields of view count as equal if their 95th percentile is at most this many times their 5th."""
LITTLE_BACKGROUND = 0.15
"""Volumes with less background are crops filled with tissue."""
COVERED = 90
"""The percentile of the fields of view that a grid covers when volumes are cropped and padded."""
THICK = 2.0
"""An axis is halved while its voxels are at most this many times as long as the shortest."""
LEAST_LATENT = 8
"""Voxels along the shortest axis of a latent, below which nothing is halved again.

Volumes of 32x32x32 are thus compressed 4x4x4; networks on latents of 16x16x16 learned little in the same time.
"""
LEAST_AT_ALL = 4
"""The same for the first level, and for volumes of few slices whose latent would be too large otherwise."""
SMALL_LATENT = 32_000
"""Voxels of a latent below which no level keeps an axis because it has few voxels."""
LARGE_LATENT = 300_000
"""Voxels of a latent above which a third level is added."""
MOST_HALVINGS = 3
FINEST_STEPS = 6
"""How many grids lie between one and the next whose voxels are twice as long."""
LEAST_VOXELS = 8**3
ROUNDING = 0.12
"""How far rounding to what both networks divide may move an axis, or the aspect, before latents are padded instead."""


@dataclass(frozen=True)
class FieldOfView:
    """The physical size that the grid covers, the finest spacing worth having, and how volumes get there.

    `strides` (2: all axes alike), their number `depth` and `unet_levels` are those that the user gave, if any.
    """

    size_mm: tuple[float, ...]
    spacing_mm: tuple[float, ...]
    resize: str = "resample"
    reason: str = ""
    is_weak: bool = False
    strides: Strides | int | None = None
    depth: int | None = None
    unet_levels: int | None = None

    def spacing_of(self, size: Sequence[float]) -> tuple[float, ...]:
        """Return the spacing of a grid with these numbers of voxels per axis."""
        return tuple(mm / n for mm, n in zip(self.size_mm, size, strict=True))


@dataclass(frozen=True)
class Layout:
    """A grid, its spacing, and how both networks divide it."""

    grid: Grid
    spacing_mm: tuple[float, ...]
    strides: Strides
    unet_levels: int
    pads_latents: bool

    @property
    def factor(self) -> Grid:
        """Return by how much each axis shrinks from volume to latent."""
        return _factor(self.strides)

    @property
    def latent(self) -> Grid:
        """Return the axes of the latent."""
        return tuple(n // f for n, f in zip(self.grid, self.factor, strict=True))

    @property
    def stated_spacing(self) -> list[float]:
        """Return the spacing as a config states it."""
        return [float(f"{mm:.4g}") for mm in self.spacing_mm]

    @property
    def voxels(self) -> int:
        """Return the voxels of the grid."""
        return math.prod(self.grid)


def covered_field_of_view(fingerprint: Fingerprint) -> FieldOfView:
    """Choose the field of view, and whether volumes are stretched to it or cropped and padded."""
    extents, number, background = fingerprint.extents, fingerprint.number, fingerprint.background
    low, median, high = np.percentile(extents, (5, 50, 95), axis=0)
    variation = float((high / low).max())
    size, resize, few = median, "resample", number < 10
    sizes = f"the fields of view differ by up to {variation:.2f} times"
    if variation <= ALIKE:
        reason = f"the fields of view are alike (they differ by at most {variation:.2f} times), so stretching is small"
        is_weak = few
    elif not fingerprint.has_spacing:
        reason = f"{sizes} in voxels, and some files store no spacing, so each is stretched to the median"
        is_weak = True
    elif not background >= LITTLE_BACKGROUND:
        share = "unknown" if math.isnan(background) else f"{background:.0%}"
        reason = (
            f"{sizes}, and the volumes are filled to the edge (background {share}), so padding would draw borders; "
            "each is stretched to the median instead"
        )
        is_weak = True
    else:
        size, resize = np.percentile(extents, COVERED, axis=0), "crop_or_pad"
        cut = int((extents > size * 1.001).any(axis=1).sum())
        covered = "x".join(f"{mm:.0f}" for mm in size)
        reason = (
            f"{sizes}, so every volume keeps its millimetres: the grid covers {covered} mm, {cut} of {number} volumes "
            f"lose part of their edge and smaller ones are padded with background (they have {background:.0%} of it)"
        )
        is_weak = few or variation > 2
    return FieldOfView(tuple(size.tolist()), fingerprint.spacing, resize, reason, is_weak)


def layouts(view: FieldOfView) -> list[Layout]:
    """Return grids of one field of view, the coarsest first and that of the files last.

    Coarser grids lengthen the shortest voxels first, so thick slices stay as they are until the others are as thick.
    """
    found: dict[Grid, Layout] = {}
    for number in range(MOST_HALVINGS * FINEST_STEPS + 1):
        length = min(view.spacing_mm) * 2 ** (number / FINEST_STEPS)
        layout = layout_of(
            [mm / max(step, length) for mm, step in zip(view.size_mm, view.spacing_mm, strict=True)], view
        )
        if number and layout.voxels < LEAST_VOXELS:
            break
        found.setdefault(layout.grid, layout)
    return sorted(found.values(), key=lambda layout: layout.voxels)


def layout_of(size: Sequence[float], view: FieldOfView) -> Layout:
    """Return the layout of a grid of about this many voxels per axis."""
    strides = strides_of(view, size)
    factor = _factor(strides)
    levels = view.unet_levels or _unet_levels([n / f for n, f in zip(size, factor, strict=True)])
    grid = _rounded(size, [f * 2 ** (levels - 1) for f in factor], view.resize)
    changes = [n / old for n, old in zip(grid, size, strict=True)]
    pads = any(abs(change - 1) > ROUNDING for change in changes)
    if pads or (view.resize == "resample" and max(changes) / min(changes) > 1 + ROUNDING):
        grid = _rounded(size, factor, view.resize)
    return fixed_layout(grid, view, strides, levels)


def fixed_layout(grid: Grid, view: FieldOfView, strides: Strides | None = None, levels: int | None = None) -> Layout:
    """Return the layout of exactly this grid."""
    strides = strides_of(view, grid, exactly=True) if strides is None else strides
    latent = [n // f for n, f in zip(grid, _factor(strides), strict=True)]
    levels = levels or view.unet_levels or _unet_levels(latent)
    return Layout(grid, view.spacing_of(grid), strides, levels, any(n % 2 ** (levels - 1) for n in latent))


def strides_of(view: FieldOfView, size: Sequence[float], exactly: bool = False) -> Strides:
    """Return the strides that were given, else two for each axis and level, or one where voxels are long or few.

    A depth that was given is taken whatever is left of the axes. exactly: each axis must stay a whole number of voxels.
    """
    if isinstance(view.strides, tuple):
        return view.strides
    depth, alike = view.depth, view.strides == 2
    strides: list[tuple[int, ...]] = []
    size, spacing = list(size), list(view.spacing_of(size))
    while len(strides) < (MOST_HALVINGS if depth is None else depth):
        voxels = math.prod(size)
        if depth is None and len(strides) == 2 and voxels <= LARGE_LATENT:
            break
        least = LEAST_LATENT if strides and not (alike and voxels > LARGE_LATENT) else LEAST_AT_ALL
        is_long = [not alike and mm > THICK * min(spacing) * 1.001 for mm in spacing]
        is_short = [n / 2 < least or (exactly and n % 2 != 0) for n in size]
        if depth is not None:
            stride = tuple(1 if long else 2 for long in is_long)
        elif alike:
            stride = (1, 1, 1) if any(is_short) else (2, 2, 2)
        else:
            stride = tuple(1 if a or b else 2 for a, b in zip(is_long, is_short, strict=True))
            # Keeping a short axis while the others shrink pays only if there is much to gain.
            lacks = any(b and not a for a, b in zip(is_long, is_short, strict=True))
            if lacks and voxels <= SMALL_LATENT and strides:
                break
        if depth is None and set(stride) == {1}:
            break
        strides.append(stride)
        size = [n / s for n, s in zip(size, stride, strict=True)]
        spacing = [mm * s for mm, s in zip(spacing, stride, strict=True)]
    return tuple(strides)


def _factor(strides: Strides) -> Grid:
    return tuple(math.prod(stride[axis] for stride in strides) for axis in range(3))


def _unet_levels(latent: Sequence[float]) -> int:
    """Return 3 levels, fewer for latents of few voxels per axis, and 4 for large ones."""
    least = min(latent)
    if least < 8:
        return 1 if least < 4 else 2
    return 4 if least >= 16 and math.prod(latent) / 8**2 > 8192 else 3


def _rounded(size: Sequence[float], steps: Sequence[int], resize: str) -> Grid:
    """Round to multiples: up where volumes are cropped, so that little is lost, else so that the aspect is kept."""
    counts = [n / step for n, step in zip(size, steps, strict=True)]
    is_cropped = resize == "crop_or_pad"
    near = [[math.ceil(n - 0.1)] if is_cropped else [math.ceil(n), math.floor(n)] for n in counts]
    candidates = [
        tuple(min(step * max(1, n), LARGEST_AXIS - LARGEST_AXIS % step) for n, step in zip(chosen, steps, strict=True))
        for chosen in itertools.product(*near)
    ]

    def distortion(grid: Grid) -> float:
        changes = [math.log(n / old) for n, old in zip(grid, size, strict=True)]
        return max(changes) - min(changes) + abs(sum(changes)) / 3

    return min(candidates, key=distortion)


def suggested_values(facts: Fingerprint, settings: Settings) -> dict[str, Any] | None:
    """Return the keys by which a plan with these networks, and memory for any grid, brings the volumes to a grid.

    None if the settings refuse that grid.
    """
    networks, unet = settings.autoencoder, settings.ldm.unet
    view = replace(covered_field_of_view(facts), strides=networks.level_strides, unet_levels=len(unet.num_channels))
    if settings.data.spacing is not None and facts.has_spacing:
        view = replace(view, spacing_mm=tuple(settings.data.spacing))
    layout = layouts(view)[-1]
    values: dict[str, Any] = {"data.voxel_size": list(layout.grid), "data.resize": view.resize}
    if view.resize == "crop_or_pad":
        values["data.spacing"] = layout.stated_spacing
    return None if stage_problems(settings.with_overrides(values), layout.grid) else values
