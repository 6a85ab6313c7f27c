"""Other volumes as conditions: degraded if made from their targets, and brought to the latent grid as channels."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data import VolumeFile
from data.checking import VolumeFacts, measure, unusable
from data.formats import read_header
from data.geometry import INTENSITY, geometry_of, in_planes, mismatch, regridded, scale_to_network
from data.header import Header
from data.loading import Pose, in_pose, load_file, to_unit
from data.partners import PartnerSource, checked_partners
from diffusion.conditioning.kind import (
    Asked,
    ConditionKind,
    KnownVoxels,
    Partners,
    Preparation,
    Prepared,
    Space,
    block_means,
    filled,
)
from diffusion.conditioning.label_map import label_reading, mask_on_grid, reading_of
from diffusion.normalisation import Normalisation, Statistics
from models.frozen_autoencoder import weights_digest
from models.volume_codec import VolumeCodec
from runtime.files import counted, printable
from settings import DataError, DataSettings, Settings
from settings.conditioning import VOLUME, VolumeSettings

log = logging.getLogger(__name__)

HOLE = f"{VOLUME}.degrade.hole"

MAIN = "--condition"
"""The option whose files name the cases of a command, and whose space their samples lie in."""


class ConditionVolume(ConditionKind):
    """A volume on the latent grid (B, C, D, H, W), whose last channel is the share that is known."""

    name = "volume"
    section = "volume"
    unet_input = "channels"
    all_options: ClassVar = {MAIN: "condition volumes", "--mask": "holes to fill"}

    @property
    def options(self) -> Mapping[str, str]:
        """Return the option of condition volumes and, in runs that fill holes, that of their masks."""
        return self.all_options if self.s.volume.has_hole else {MAIN: self.all_options[MAIN]}

    @property
    def num_encodings(self) -> int:
        """Return how often the autoencoder encodes the condition volumes of one volume."""
        return self.s.volume.degrade.variants if self.s.volume.encoding == "autoencoder" else 0

    def find(self, files: Sequence[VolumeFile], data: DataSettings, problems: list[str]) -> Partners:
        """Find the other volume of each volume, which may be itself, and the mask of its hole."""
        s, found = self.s.volume, {"volumes": tuple(files)}
        if isinstance(s.degrade.hole, str):
            place = PartnerSource(s.degrade.hole, HOLE, "hole")
            found["masks"] = checked_partners(place, files, data, label_reading(data), mask_problem, problems)
        if not s.is_from_target:
            assert s.source is not None, "condition volumes have a source"
            place, reading = PartnerSource(s.source, f"{VOLUME}.source", "volume"), volume_reading(data, s)
            check = partial(volume_problem, reading=reading, s=s)
            found["volumes"] = checked_partners(place, files, data, reading, check, problems, s.num_channels)
        return Partners(found)

    def prepare(self, partners: Partners, run: Preparation) -> Prepared:
        """Make the channels of all volumes, and normalise them by those of the training volumes in the first pass."""
        s, settings, volumes = self.s.volume, run.settings, partners.files["volumes"]
        masks = partners.files.get("masks", ())
        data, codec = volume_reading(settings.data, s), None if s.encoding == "resample" else run.codec

        def unknown(index: int, variant: int, pose: Pose | None = None) -> Tensor | None:
            if not s.has_hole:
                return None
            if s.degrade.box is None:
                return mask_on_grid(masks[index].path, data, pose)
            return hole_mask(data.voxel_size, s.degrade.box, settings.seed, volumes[index].digest, variant)

        def image(index: int, pose: Pose | None = None) -> Tensor:
            loaded = load_file(volumes[index], data).image
            loaded = loaded if pose is None else in_pose(loaded, pose)
            return lowered(loaded, s.degrade.downsample) if s.is_from_target and s.degrade.is_coarser else loaded

        def channels(index: int, variant: int, pose: Pose | None) -> Tensor:
            loaded, hole = image(index, pose), unknown(index, variant, pose)
            return on_latent_grid(loaded, hole, codec, settings.latent_shape[1:])

        def made_from(index: int, variant: int) -> str:
            return f"{volumes[index].digest} {masks[index].digest if masks else ''} {variant}"

        degrade = s.degrade.model_dump(mode="json", include={"downsample", "hole"}) if s.is_from_target else None
        by = None if codec is None else [weights_digest(codec.autoencoder), codec.precision.name]
        intensity = data.model_dump(mode="json", include={"intensity", "frame"})
        seed = None if s.degrade.box is None else settings.seed
        key = ["volume", reading_of(data), intensity, list(settings.latent_shape[1:]), by, degrade, seed]
        shape, variants = self.shape(settings), s.degrade.variants
        read = run.cached(channels, made_from, shape, key, "condition volumes", variants)
        if run.learned is None:
            statistics = Statistics(len(run.volumes.train), (shape[0] - 1, *shape[1:]))
            with run.process.raise_on_all_ranks():
                for index in range(run.process.rank, len(run.volumes.train), run.process.world_size):
                    statistics.add(index, read(index, 0, 0)[:-1])
            normalisation = statistics.normalisation(run.process, may_be_constant=True)
        else:
            normalisation = run.learned[self.name]

        def picture(index: int) -> Tensor:
            shown, hole = to_unit(image(index)[0]), unknown(index, 0)
            return shown if hole is None else shown.masked_fill(hole, 0.0)

        return Prepared(
            lambda index, number, copy: normalised(read(index, number, copy), normalisation),
            normalisation.content("condition"),
            picture,
            (lambda index: KnownVoxels(unknown(index, 0), s.degrade.downsample)) if s.is_from_target else None,
        )

    def learned(self, metadata: Mapping[str, Any], settings: Settings) -> Normalisation:
        """Return the normalisation of the channels but for the last."""
        return Normalisation.stored(dict(metadata), self.shape(settings)[0] - 1, "condition")

    def read_files(
        self, paths: Mapping[str, Path], asked: Asked, codec: VolumeCodec | None
    ) -> tuple[Tensor, Space] | None:
        """Return the channels of a condition volume, without what its mask covers, and its space."""
        path, mask = paths.get(MAIN), paths.get("--mask")
        if path is None:
            return None
        s, data, on_grid, in_file = self.s.volume, asked.settings.data, None, None
        if mask is not None:
            on_grid, in_file = read_mask(mask, path, data)
        image, space = read_condition(path, data, s, in_file)
        if on_grid is not None:
            space = replace(space, on_grid=(KnownVoxels(on_grid), to_unit(image)))
        codec = None if s.encoding == "resample" else codec
        channels = on_latent_grid(image, on_grid, codec, asked.settings.latent_shape[1:])
        return normalised(channels, asked.learned[self.name]), space


def volume_reading(data: DataSettings, s: VolumeSettings) -> DataSettings:
    """Return the settings with which condition volumes are read: as the volumes, with intensities of their own."""
    return data if s.is_from_target else data.model_copy(update={"intensity": s.intensity})


def volume_problem(path: Path, facts: VolumeFacts, reading: DataSettings, s: VolumeSettings) -> str | None:
    """Return why a file cannot be a condition volume, or None if it can."""
    if facts.num_channels == s.num_channels:
        problem = unusable(facts, reading, INTENSITY if s.is_from_target else f"{VOLUME}.intensity")
    else:
        found = f"{counted(facts.num_channels, 'channel')} ({' x '.join(map(str, facts.axes))})"
        problem = f"{found}; {VOLUME}.num_channels is {s.num_channels}; change one of the two"
    return None if problem is None else f"{printable(path)}: {problem}"


def mask_problem(path: Path, facts: VolumeFacts) -> str | None:
    """Return why a file cannot be a mask, or None if it can."""
    if facts.num_channels == 1 and not facts.num_not_finite:
        return None
    found = f"{counted(facts.num_channels, 'channel')}, {facts.num_not_finite:,} values that are not finite"
    return f"{printable(path)}: {found}; a mask has one channel of finite numbers; repair it"


def lowered(image: Tensor, factors: Sequence[int]) -> Tensor:
    """Average blocks of `factors` voxels of a (C, D, H, W) volume, and interpolate back to its grid.

    A file of the lower resolution gets to the network's grid by the same interpolation.
    """
    coarse = block_means(image, factors)[None]
    return F.interpolate(coarse, size=image.shape[1:], mode="trilinear", align_corners=False)[0]


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


def on_latent_grid(image: Tensor, unknown: Tensor | None, codec: VolumeCodec | None, grid: Sequence[int]) -> Tensor:
    """Return the channels of a condition volume, encoded or averaged with its hole filled; the last: what is known."""
    factors = [n // m for n, m in zip(image.shape[1:], grid, strict=True)]
    # A sharp border would change what the autoencoder says of the voxels around the hole.
    image = image if unknown is None else filled(image, unknown)
    channels = block_means(image, factors) if codec is None else codec.encode(image).cpu()
    known = torch.ones(1, *grid) if unknown is None else block_means((~unknown)[None].float(), factors)
    return torch.cat([channels, known])


def normalised(channels: Tensor, normalisation: Normalisation) -> Tensor:
    """Return the channels of a condition volume normalised, but for the last, which says what is known."""
    return torch.cat([normalisation.apply(channels[:-1]), channels[-1:]])


def held_out_with_hole(partners: Partners | None, volumes: Sequence[VolumeFile], data: DataSettings) -> list[int]:
    """Return the places of the last volumes, held-out ones, without those whose mask is empty.

    Raise `DataError` if fewer than two are left.
    """
    masks = () if partners is None else partners.files.get("masks", ())
    if not masks:
        return list(range(len(volumes)))
    found = [n for n, mask in enumerate(masks[-len(volumes) :]) if mask_on_grid(mask.path, data).any()]
    if len(found) < 2:
        raise DataError(
            f"{HOLE}: {counted(len(found), 'held-out mask')} with voxels above 0 on the network's grid; evaluation "
            "needs at least 2; add masks, or increase data.val_fraction"
        )
    return found


def read_condition(
    path: Path, data: DataSettings, s: VolumeSettings, unknown: np.ndarray | None = None
) -> tuple[Tensor, Space]:
    """Read a condition volume onto the network's grid (C, D, H, W); return it with its space.

    A file of lower resolution than its target is first interpolated to the target's voxels. What the file holds where
    it is `unknown`, bool on its grid, has no influence.
    """
    reading = volume_reading(data, s)
    stored, facts = measure(path, reading, None if unknown is None else ~unknown)
    problem = volume_problem(path, facts, reading, s)
    if problem is not None:
        raise DataError(problem)
    voxels, factors = stored.values(stored.array), (1, 1, 1)
    header: Header = facts
    if s.is_from_target and s.degrade.is_coarser:
        by_axis = dict(zip(geometry_of(header, reading).axes, s.degrade.downsample, strict=True))
        factors = (by_axis[0], by_axis[1], by_axis[2])
        header = _finer(header, factors)
    geometry = geometry_of(header, reading)
    shown = regridded(voxels, header.shape) if factors != (1, 1, 1) else voxels
    if unknown is not None:
        shown = np.where(unknown, np.array(facts.lower, np.float32)[:, None, None, None], voxels)
    planes = in_planes(geometry.oriented(shown))
    parts = (scale_to_network(np.array(part, np.float32), facts.lower, facts.upper) for part in planes)
    image = torch.from_numpy(geometry.to_network_grid(facts.num_channels, parts))
    if not s.is_from_target:
        return image, Space(geometry)
    known = KnownVoxels(None if unknown is None else torch.from_numpy(unknown), factors)
    return image, Space(geometry, facts.lower, facts.upper, voxels, known)


def read_mask(path: Path, volume: Path, data: DataSettings) -> tuple[Tensor, np.ndarray]:
    """Read where a volume is unknown, a mask above 0: bool on the network's grid (D, H, W), and on the file's.

    The mask must lie on the volume's grid, but its axes may have another order and direction. Raises DataError if it
    does not.
    """
    stored, header = measure(path, label_reading(data))
    if (problem := mask_problem(path, header)) is not None:
        raise DataError(problem)
    of_volume = read_header(volume)
    geometry = geometry_of(of_volume, data)
    turned = geometry.stored_again(geometry_of(header, data).oriented(stored.array))
    if turned.shape[1:] != of_volume.shape:
        raise DataError(
            f"{printable(path)}: {' x '.join(map(str, header.shape))} voxels, and {printable(volume)} has "
            f"{' x '.join(map(str, of_volume.shape))}; a mask needs the shape of its volume; resample it"
        )
    if (problem := mismatch(path, header, volume, of_volume, data)) is not None:
        raise DataError(problem)
    unknown = stored.values(turned)[0] > 0
    if unknown.all():
        raise DataError(
            f"{printable(path)}: above 0 everywhere, so nothing of {printable(volume)} is known; a mask is 0 where the "
            "volume is known; change it"
        )
    inside = geometry.to_file_grid(np.ones((1, *geometry.grid), np.float32))[0] > 0
    if number := int((unknown & ~inside).sum()):  # which cannot be filled
        text = "%s: %s of its %s voxels above 0 lie outside the network's grid and get the lowest intensity"
        log.warning(text, printable(path), f"{number:,}", f"{int(unknown.sum()):,}")
    return mask_on_grid(path, data), unknown


def _finer(header: Header, factors: tuple[int, int, int]) -> Header:
    """Return the header of the same volume with each voxel divided into blocks of `factors` voxels."""
    x, y, z = (n * factor for n, factor in zip(header.shape, factors, strict=True))
    division = np.diag([*(1 / factor for factor in factors), 1.0])
    division[:3, 3] = [(1 / factor - 1) / 2 for factor in factors]
    return replace(header, shape=(x, y, z), axes=(x, y, z), affine=header.affine @ division)
