"""Label maps as conditions: the share of each label value in each voxel of the latent grid, as further channels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from data import VolumeFile
from data.files.header import Stored
from data.formats import read_stored
from data.geometry import Geometry, geometry_of, in_planes
from data.loading import Pose
from data.partners import PartnerSource, checked_partners
from data.reading import VolumeFacts, measure
from diffusion.conditioning.cache import cached
from diffusion.conditioning.kind import Asked, ConditionKind, Partners, Preparation, Prepared
from diffusion.conditioning.space import Space
from models.volume_codec import VolumeCodec
from runtime.files.names import printable
from settings import DataError, DataSettings, Settings
from settings.conditioning import LABEL_MAP
from settings.data import IntensitySettings

log = logging.getLogger(__name__)

READING = {"spacing", "voxel_size", "resize"}
"""The settings that decide where a voxel of a file lies on the network's grid."""


class LabelMap(ConditionKind):
    """The shares of label values (B, num_classes, D, H, W)."""

    name = "label map"
    section = "label_map"
    unet_input = "channels"
    options: ClassVar = {"--labels": "label maps"}

    def find(self, files: Sequence[VolumeFile], data: DataSettings, problems: list[str]) -> Partners:
        """Find the label map of each volume, and the label values of the classes."""
        s, maps, earlier = self.s.label_map, dict[Path, VolumeFacts](), len(problems)

        def check(path: Path, facts: VolumeFacts) -> str | None:
            maps[path] = facts
            return label_problem(path, facts)

        assert s.source is not None, "label maps have a source"
        place = PartnerSource(s.source, f"{LABEL_MAP}.source", "label_map")
        labels = checked_partners(place, files, data, label_reading(data), check, problems)
        values: tuple[int, ...] = ()
        if maps and len(problems) == earlier:
            values, too_many = class_values(maps, s.num_classes)
            problems += [too_many] if too_many else []
        if values:
            log.info("%s: the label values %s are the classes 0 to %d", LABEL_MAP, values_text(values), len(values) - 1)
        return Partners({"labels": labels}, label_values=values)

    def prepare(self, partners: Partners, run: Preparation) -> Prepared:
        """Make the shares of all volumes."""
        data, grid = run.settings.data, run.settings.latent_shape[1:]
        number, values, maps = self.s.label_map.num_classes, partners.label_values, partners.files["labels"]
        if run.learned is not None and values != run.learned[self.name]:
            # The maps changed since training; a value keeps the class that the network knows it by.
            values = run.learned[self.name]
            found = (unknown_values(file.path, number, values) for file in maps)
            if (problem := next((text for text in found if text is not None), None)) is not None:
                raise DataError(problem)

        def shares(index: int, variant: int, pose: Pose | None) -> Tensor:
            return label_shares(maps[index].path, number, data, grid, values, pose)

        key = ["labels", number, reading_of(data), list(grid), *([list(values)] if values else [])]
        read = cached(shares, lambda index, variant: maps[index].digest, (number, *grid), key, run, "label maps")

        def picture(index: int) -> Tensor:
            return torch.einsum("c,cdhw->dhw", torch.linspace(0, 1, number), read(index, 0, 0))

        return Prepared(read, {"label_values": list(values)} if values else {}, picture)

    def learned(self, metadata: Mapping[str, Any], settings: Settings) -> tuple[int, ...]:
        """Return the label values of the classes; empty if they are the classes' numbers."""
        values = metadata.get("label_values", [])
        if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
            raise ValueError("label_values is not a list of whole numbers")
        return tuple(values)

    def read_files(
        self, paths: Mapping[str, Path], asked: Asked, codec: VolumeCodec | None
    ) -> tuple[Tensor, Space] | None:
        """Return the shares of a label map, whose values must be known, and its space."""
        path = paths.get("--labels")
        if path is None:
            return None
        data, number, values = asked.settings.data, self.s.label_map.num_classes, asked.learned[self.name]
        _, facts = measure(path, label_reading(data))
        problem = label_problem(path, facts) or unknown_values(path, number, values)
        if problem is not None:
            raise DataError(problem)
        shares = label_shares(path, number, data, asked.settings.latent_shape[1:], values)
        return shares, Space(geometry_of(facts.header, data))


def label_shares(
    path: Path,
    num_classes: int,
    s: DataSettings,
    grid: Sequence[int],
    values: Sequence[int] = (),
    pose: Pose | None = None,
) -> Tensor:
    """Return float32 (num_classes, D, H, W): the share of each class in each voxel of `grid`.

    `values` are the label values of the classes; without them a value is the number of its class. The map takes the
    volume's way to the network's grid, so both are turned, resampled and cropped alike; what padding adds is
    background. There it takes the `pose`, if there is one, and voxels are averaged. `grid` divides the network's grid.
    """
    stored, header = read_stored(path)
    geometry, (d, h, w) = geometry_of(header, s), grid
    shares = np.zeros((num_classes, *grid), np.float32)
    for number, value in enumerate(values or range(num_classes)):
        if number:
            share = _covered(stored, geometry, lambda voxels, value=value: voxels == value) / 2 + 0.5  # type: ignore[misc]
            share = share if pose is None else pose.apply(share, order=1)
            blocks = share.reshape(d, share.shape[0] // d, h, share.shape[1] // h, w, share.shape[2] // w)
            shares[number] = blocks.mean(axis=(1, 3, 5), dtype=np.float32)
    shares[0] = np.maximum(1 - shares[1:].sum(axis=0), 0)
    return torch.from_numpy(shares)


def mask_on_grid(path: Path, s: DataSettings, pose: Pose | None = None) -> Tensor:
    """Return bool (D, H, W) on the network's grid: True wherever a mask above 0 covers any part of a voxel."""
    stored, header = read_stored(path)
    covered = _covered(stored, geometry_of(header, s), lambda voxels: voxels > 0)
    # A little above the lower end, for the rounding of weights that add up to 1.
    return torch.from_numpy((covered if pose is None else pose.apply(covered, order=1)) > -1 + 1e-4)


def _covered(stored: Stored, geometry: Geometry, is_inside: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return (D, H, W) from -1 to 1, how much of each voxel lies where `is_inside`; -1 is what padding gets."""
    oriented = geometry.oriented(stored.array)
    parts = (2 * is_inside(stored.values(part)).astype(np.float32) - 1 for part in in_planes(oriented))
    return geometry.to_network_grid(1, parts)[0]


def label_reading(data: DataSettings) -> DataSettings:
    """Return the settings with which label maps are measured; they are not scaled, and not kept on the voxel grid."""
    window = IntensitySettings(mode="window", lower=-1.0, upper=1.0)
    return data.model_copy(update={"intensity": window, "prepared": "none", "frame": None, "spacing": None})


def reading_of(s: DataSettings) -> dict[str, Any]:
    """Return the settings that decide where a voxel lies, as plain values."""
    return s.model_dump(mode="json", include=READING)


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


def class_values(maps: Mapping[Path, VolumeFacts], num_classes: int) -> tuple[tuple[int, ...], str | None]:
    """Return the label values of the classes, in ascending order, and why there are too many, or None.

    No values are returned if each value is the number of its class. Otherwise the values have gaps, as those of
    parcellations have, and 0, the background, is the first of them.
    """
    if all(facts.maximum < num_classes for facts in maps.values()):
        return (), None
    found: dict[int, Path] = {0: Path()}
    for path in maps:
        for value in _values_in(path):
            found.setdefault(value, path)
    values = tuple(sorted(found))
    if len(values) <= num_classes:
        return values, None
    return (), (
        f"{LABEL_MAP}.num_classes: {num_classes}, and the label maps have {len(values)} values: {values_text(values)}, "
        f"such as {values[-1]} in {printable(found[values[-1]])}; as many classes as values are needed; set "
        f"{len(values)}"
    )


def _values_in(path: Path) -> list[int]:
    stored, _ = read_stored(path)
    return np.unique(stored.values(stored.array)).astype(int).tolist()


def unknown_values(path: Path, num_classes: int, values: Sequence[int]) -> str | None:
    """Return which label values of a file are not those of a class, or None if all are."""
    known = values or range(num_classes)
    unknown = sorted({*_values_in(path)} - {*known})
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
