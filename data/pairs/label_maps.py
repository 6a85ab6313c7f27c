"""Reads a label map as the share of each label value in each voxel of a coarser grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from data.formats import read_stored
from data.geometry import geometry_of, in_planes
from data.poses import Pose
from data.reading import VolumeFacts
from runtime.files.names import printable
from settings.data import DataSettings


def label_shares(
    path: Path,
    num_classes: int,
    s: DataSettings,
    grid: Sequence[int],
    values: Sequence[int] = (),
    pose: Pose | None = None,
) -> np.ndarray:
    """Return float32 (num_classes, D, H, W): the share of each class in each voxel of `grid`.

    `values` are the label values of the classes; without them a value is the number of its class. The map takes the
    volume's way to the network's grid, so both are turned, resampled and cropped alike; what padding adds is
    background. There it takes the `pose`, if there is one, and voxels are averaged. `grid` divides the network's grid.
    """
    stored, header = read_stored(path)
    geometry = geometry_of(header, s)
    oriented = geometry.oriented(stored.array)
    shares = np.zeros((num_classes, *grid), np.float32)
    for number, value in enumerate(values or range(num_classes)):
        if number == 0:
            continue
        # In the network's range, because padding gets its lower end: no share.
        parts = (2 * (stored.values(part) == value).astype(np.float32) - 1 for part in in_planes(oriented))
        share = geometry.to_network_grid(1, parts)[0] / 2 + 0.5
        shares[number] = _averaged(share if pose is None else pose.apply(share, order=1), grid)
    shares[0] = np.maximum(1 - shares[1:].sum(axis=0), 0)
    return shares


def mask_on_grid(path: Path, s: DataSettings, pose: Pose | None = None) -> np.ndarray:
    """Return bool (D, H, W) on the network's grid: True wherever a mask above 0 covers any part of a voxel."""
    stored, header = read_stored(path)
    geometry = geometry_of(header, s)
    oriented = geometry.oriented(stored.array)
    parts = (2 * (stored.values(part) > 0).astype(np.float32) - 1 for part in in_planes(oriented))
    covered = geometry.to_network_grid(1, parts)[0]
    # A little above the lower end, for the rounding of weights that add up to 1.
    return (covered if pose is None else pose.apply(covered, order=1)) > -1 + 1e-4


def mask_problem(path: Path, facts: VolumeFacts) -> str | None:
    """Return why a file cannot be a mask, or None if it can."""
    if facts.num_channels != 1 or facts.num_not_finite:
        found = f"{facts.num_channels} channels" if facts.num_channels != 1 else "values that are not finite"
        return f"{printable(path)}: {found}; a mask has one channel of finite numbers; repair it"
    return None


def label_problem(path: Path, facts: VolumeFacts) -> str | None:
    """Return why a file cannot be a label map, or None if it can."""
    name = printable(path)
    if facts.num_channels != 1:
        return (
            f"{name}: {facts.num_channels} channels ({' x '.join(map(str, facts.axes))}); a label map has one; "
            "merge them into one map"
        )
    if not facts.is_whole:
        return f"{name}: values that are not whole numbers, so it is not a label map; round it or take it out"
    if facts.minimum < 0:
        return f"{name}: a label value of {facts.minimum:g}; 0 and above is allowed; change the map"
    return None


def class_values(maps: Mapping[Path, VolumeFacts], num_classes: int, where: str) -> tuple[tuple[int, ...], str | None]:
    """Return the label values of the classes, in ascending order, and why there are too many, or None.

    No values are returned if each value is the number of its class. Otherwise the values have gaps, as those of
    parcellations have, and 0, the background, is the first of them.
    """
    if all(facts.maximum < num_classes for facts in maps.values()):
        return (), None
    found: dict[int, Path] = {0: Path()}
    for path in maps:
        for value in values_in(path):
            found.setdefault(value, path)
    values = tuple(sorted(found))
    if len(values) <= num_classes:
        return values, None
    return (), (
        f"{where}.num_classes: {num_classes}, and the label maps have {len(values)} values: {values_text(values)}, "
        f"such as {values[-1]} in {printable(found[values[-1]])}; as many classes as values are needed; set "
        f"{len(values)}"
    )


def values_in(path: Path) -> list[int]:
    """Return the values of a label map in ascending order."""
    stored, _ = read_stored(path)
    return np.unique(stored.values(stored.array)).astype(int).tolist()


def unknown_values(path: Path, facts: VolumeFacts, num_classes: int, values: Sequence[int]) -> str | None:
    """Return which label values of a file are not those of a class, or None if all are."""
    known = values or range(num_classes)
    if not values and facts.maximum < num_classes:
        return None
    unknown = sorted({*values_in(path)} - {*known})
    if not unknown:
        return None
    trained = values_text(tuple(known))
    return f"{printable(path)}: label values {values_text(unknown)}; the network knows {trained}; change the map"


def values_text(values: Sequence[int]) -> str:
    """Return whole numbers in few words."""
    if len(values) > 1 and values[-1] - values[0] == len(values) - 1:
        return f"{values[0]} to {values[-1]}"
    shown = [*map(str, values)] if len(values) <= 8 else [*map(str, values[:4]), "...", *map(str, values[-2:])]
    return ", ".join(shown)


def _averaged(image: np.ndarray, grid: Sequence[int]) -> np.ndarray:
    """Average equal blocks of a (D, H, W) volume, one for each voxel of `grid`."""
    d, h, w = grid
    parts = image.reshape(d, image.shape[0] // d, h, image.shape[1] // h, w, image.shape[2] // w)
    return parts.mean(axis=(1, 3, 5), dtype=np.float32)
