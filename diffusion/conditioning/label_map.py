"""Label maps as conditions: the share of each label value in each voxel of the latent grid, as further channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from data import VolumeFile
from data.checking import VolumeFacts, measure
from data.formats import read_stored
from data.geometry import Geometry, geometry_of, in_planes
from data.header import Stored
from data.loading import Pose
from data.partners import PartnerSource, checked_partners
from diffusion.conditioning.kind import Asked, ConditionKind, Input, Partners, Preparation, Prepared, Space
from models.volume_codec import VolumeCodec
from runtime.files import printable
from settings import DataError, DataSettings, Settings
from settings.conditioning import LABEL_MAP
from settings.data import IntensitySettings


class LabelMap(ConditionKind):
    """The shares of label values (B, num_classes, D, H, W)."""

    name = "label map"
    section = "label_map"
    unet_input: ClassVar[Input] = "channels"
    all_options: ClassVar = {"--labels": "label maps"}

    @property
    def is_used(self) -> bool:
        """Return whether label maps reach the U-Net in this way."""
        return self.keys.is_used and bool(self.s.label_map.controlnet) == (self.unet_input == "control")

    def find(self, files: Sequence[VolumeFile], data: DataSettings, problems: list[str]) -> Partners:
        """Find the label map of each volume."""
        s = self.s.label_map
        assert s.source is not None, "label maps have a source"
        place = PartnerSource(s.source, f"{LABEL_MAP}.source", "label_map")

        def check(path: Path, facts: VolumeFacts) -> str | None:
            return label_problem(path, facts, s.num_classes)

        return Partners({"labels": checked_partners(place, files, data, label_reading(data), check, problems)})

    def prepare(self, partners: Partners, run: Preparation) -> Prepared:
        """Make the label maps of all volumes as the U-Net gets them."""
        number, maps, shape = self.s.label_map.num_classes, partners.files["labels"], self.shape(run.settings)

        def made(index: int, variant: int, pose: Pose | None) -> Tensor:
            return self.on_grid(maps[index].path, run.settings, pose)

        what = "labels" if self.unet_input == "channels" else "control"
        key = [what, number, reading_of(run.settings.data), list(shape[1:])]
        read = run.cached(made, lambda index, variant: maps[index].digest, shape, key, "label maps")
        return Prepared(read, picture=lambda index: self.picture(read(index, 0, 0)), shown_as=LabelMap.name)

    def on_grid(self, path: Path, settings: Settings, pose: Pose | None = None) -> Tensor:
        """Return the shares of the label values of one map."""
        return label_shares(path, self.s.label_map.num_classes, settings.data, settings.latent_shape[1:], pose)

    def picture(self, part: Tensor) -> Tensor:
        """Return the condition of one sample as (D, H, W) in [0, 1]."""
        return torch.einsum("c,cdhw->dhw", torch.linspace(0, 1, len(part)), part)

    def read_files(
        self, paths: Mapping[str, Path], asked: Asked, codec: VolumeCodec | None
    ) -> tuple[Tensor, Space] | None:
        """Return a label map as the U-Net gets it, and its space."""
        path = paths.get("--labels")
        if path is None:
            return None
        data = asked.settings.data
        _, facts = measure(path, label_reading(data))
        if (problem := label_problem(path, facts, self.s.label_map.num_classes)) is not None:
            raise DataError(problem)
        return self.on_grid(path, asked.settings), Space(geometry_of(facts, data))


class ControlMap(LabelMap):
    """Label values on the volume's grid (B, 1, D, H, W), for a ControlNet; -1 where the map is hidden.

    Training never hides one: without its label map a ControlNet has no part in the prediction.
    """

    name = "control map"
    unet_input = "control"
    draws = ()

    def shape(self, settings: Settings) -> tuple[int, ...]:
        """Return the shape of one label map."""
        return (1, *settings.data.voxel_size)

    def on_grid(self, path: Path, settings: Settings, pose: Pose | None = None) -> Tensor:
        """Return the value with the largest share in each voxel."""
        return label_values(path, settings.data, pose)[None]

    def picture(self, part: Tensor) -> Tensor:
        """Return the label values as (D, H, W) in [0, 1]."""
        return part[0] / (self.s.label_map.num_classes - 1)

    def hidden(self, part: Tensor) -> Tensor:
        """Return a map that turns the ControlNet off."""
        return torch.full_like(part, -1)


def label_shares(
    path: Path, num_classes: int, s: DataSettings, grid: Sequence[int], pose: Pose | None = None
) -> Tensor:
    """Return float32 (num_classes, D, H, W): the share of each label value in each voxel of `grid`.

    The map takes the volume's way to the network's grid, so both are turned, resampled and cropped alike; what padding
    adds is background. There it takes the `pose`, if there is one, and voxels are averaged. `grid` divides the
    network's grid.
    """
    d, h, w = grid
    shares = np.zeros((num_classes, *grid), np.float32)
    for value, share in _shares(path, range(1, num_classes), s, pose):
        blocks = share.reshape(d, share.shape[0] // d, h, share.shape[1] // h, w, share.shape[2] // w)
        shares[value] = blocks.mean(axis=(1, 3, 5), dtype=np.float32)
    shares[0] = np.maximum(1 - shares[1:].sum(axis=0), 0)
    return torch.from_numpy(shares)


def label_values(path: Path, s: DataSettings, pose: Pose | None = None) -> Tensor:
    """Return float32 (D, H, W): the label value with the largest share in each voxel of the network's grid."""
    stored, _ = read_stored(path)
    present = {int(value) for value in stored.values(np.unique(stored.array))}
    values, largest, background = (np.full(s.voxel_size, start, np.float32) for start in (0, 0, 1))
    for value, share in _shares(path, sorted(present - {0}), s, pose):
        values[share > largest] = value
        largest, background = np.maximum(largest, share), background - share
    values[background >= largest] = 0
    return torch.from_numpy(values)


def _shares(path: Path, values: Iterable[int], s: DataSettings, pose: Pose | None) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each of some label values with its share (D, H, W) in the voxels of the network's grid."""
    stored, header = read_stored(path)
    geometry = geometry_of(header, s)
    for value in values:
        share = _covered(stored, geometry, lambda voxels, value=value: voxels == value) / 2 + 0.5  # type: ignore[misc]
        yield value, share if pose is None else pose.apply(share, order=1)


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
    """Return the settings that decide where a voxel of a file lies on the network's grid, as plain values."""
    return s.model_dump(mode="json", include={"spacing", "voxel_size", "resize"})


def label_problem(path: Path, facts: VolumeFacts, num_classes: int) -> str | None:
    """Return why a file cannot be a label map, or None if it can."""
    name = printable(path)
    if facts.num_channels != 1:
        return f"{name}: {facts.num_channels} channels; a label map has one; merge them into one map"
    if not facts.is_whole:
        return f"{name}: values that are not whole numbers, so it is not a label map; round it or take it out"
    if not 0 <= facts.minimum <= facts.maximum < num_classes:
        return (
            f"{name}: label values from {facts.minimum:g} to {facts.maximum:g}; 0 to {num_classes - 1} is allowed by "
            f"{LABEL_MAP}.num_classes; renumber the map, or change the number before training"
        )
    return None
