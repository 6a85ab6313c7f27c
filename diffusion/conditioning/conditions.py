"""The conditions of a run: made once from the volumes' partners, and read back for each batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data import DataSplit, VolumeFile, in_pose, load_file, to_unit
from data.pairs.label_maps import label_shares, mask_on_grid
from data.pairs.numbers import NumberCode, code_of
from data.pairs.pairs import Pairs, volume_reading
from data.poses import Pose
from diffusion.conditioning.condition import Condition
from diffusion.conditioning.kept import keep
from diffusion.conditioning.scan import scan_vectors
from diffusion.conditioning.volumes import Encode, degraded, joined_volume, normalised
from diffusion.latent_files import digest_of
from diffusion.normalisation import Normalisation, Statistics
from models.frozen_autoencoder import weights_digest
from models.volume_codec import VolumeCodec
from runtime.processes import Process
from settings import DataSettings, Settings
from settings.conditioning import ConditioningSettings

LABEL_MAP, VOLUME = "label map", "volume"

READING = {"spacing", "voxel_size", "resize"}
"""The settings that decide where a voxel of a file lies on the network's grid."""

Read = Callable[[int, int, int], Tensor]
"""Returns the channels (C, D, H, W) of a volume's condition by its number and those of the variant and the copy."""

Image = Callable[[int, int, Pose | None], tuple[Tensor, Tensor | None]]
"""Returns the condition volume (C, D, H, W) of a volume in a pose, and where it is unknown, as bool (D, H, W)."""


@dataclass(frozen=True)
class Poses:
    """The augmented copies of each training volume: how many, and the pose of each by the volume's index and its own.

    Copies are numbered from 1; 0 is the volume as it is.
    """

    of: Callable[[int, int], Pose]
    num_copies: int


@dataclass(frozen=True)
class _Entries:
    """The conditions that are kept, by number: variants of each volume's, then one of each copy of training volumes."""

    volumes: DataSplit
    variants: int
    poses: Poses | None

    def all(self) -> list[tuple[int, int, int]]:
        """Return volume, variant and copy of each entry. Each copy is another variant."""
        number = len(self.volumes.train) + len(self.volumes.val)
        entries = [(index, variant, 0) for index in range(number) for variant in range(self.variants)]
        copies = range(1, 1 + (0 if self.poses is None else self.poses.num_copies))
        return entries + [(index, copy, copy) for index in range(len(self.volumes.train)) for copy in copies]

    def number(self, index: int, variant: int, copy: int) -> int:
        """Return the number of an entry; variants repeat."""
        if copy == 0:
            return index * self.variants + variant % self.variants
        assert self.poses is not None, "a copy has a pose"
        num_volumes = len(self.volumes.train) + len(self.volumes.val)
        return num_volumes * self.variants + index * self.poses.num_copies + copy - 1

    def pose(self, index: int, copy: int) -> Pose | None:
        """Return the pose of a copy, None for the volume as it is."""
        return None if copy == 0 or self.poses is None else self.poses.of(index, copy)

    def name(self, made_from: str, index: int, copy: int) -> str:
        """Return a name for a condition; what a copy is made from includes its volume, which decides the pose."""
        return f"{made_from} {digest_of(self.volumes.train[index])} {copy}" if copy else made_from


@dataclass(frozen=True)
class Conditions:
    """How to read the conditions of the volumes, whose numbers are found by their names.

    `joined` has a reader for each kind of condition that is joined to the noisy latent, whose grid is `grid`, and
    `normalisation` is that of volumes. `vectors` are the numbers of all volumes in their `code`, `scans` what
    MAISI's U-Net is told of them besides their `modality`. `image` returns the condition volume itself.
    """

    numbers: dict[str, int]
    joined: dict[str, Read]
    grid: tuple[int, ...]
    digest: str
    normalisation: Normalisation | None = None
    code: NumberCode | None = None
    vectors: Tensor | None = None
    image: Image | None = None
    scans: Tensor | None = None
    modality: int | None = None
    label_values: tuple[int, ...] = ()

    def of(
        self, names: Sequence[str], passes: Sequence[int] | None = None, copies: Sequence[int] | None = None
    ) -> Condition:
        """Return the conditions of the volumes with these names, with their modality but without their classes.

        A volume whose condition has variants has another in each pass over the volumes, the first by default. `copies`
        are the numbers of the volumes' augmented copies.
        """
        numbers = [self.numbers[name] for name in names]
        joined = None
        if self.joined:
            none = [0] * len(names)
            entries = zip(numbers, passes or none, copies or none, strict=True)
            joined = torch.stack([self._joined(*entry) for entry in entries])
        classes = None if self.modality is None else torch.full((len(names),), self.modality)
        told, scan = (None if rows is None else rows[numbers] for rows in (self.vectors, self.scans))
        return Condition(classes, joined, told, scan)

    def of_files(self, files: Sequence[VolumeFile], s: ConditioningSettings) -> Condition:
        """Return the conditions of volumes, their classes among them."""
        condition = self.of([file.name for file in files])
        if s.type != "class":
            return condition
        return replace(condition, classes=torch.tensor([file.label or 0 for file in files]))

    def of_held_out(self, files: Sequence[VolumeFile], s: ConditioningSettings, positions: Sequence[int]) -> Condition:
        """Return the conditions of samples: those of the held-out `files` in turn."""
        return self.of_files([files[position % len(files)] for position in positions], s)

    def _joined(self, number: int, variant: int, copy: int) -> Tensor:
        parts = {kind: read(number, variant, copy) for kind, read in self.joined.items()}
        if self.normalisation is not None and VOLUME in parts:
            parts[VOLUME] = normalised(parts[VOLUME], self.normalisation)
        return torch.cat(list(parts.values()))

    def shown(self, name: str) -> list[tuple[str, Tensor]]:
        """Return each kind of condition of a volume as a (D, H, W) volume in [0, 1], to look at."""
        pictures = []
        for kind, read in self.joined.items():
            if kind == LABEL_MAP:
                shares = read(self.numbers[name], 0, 0)
                pictures.append((kind, torch.einsum("c,cdhw->dhw", torch.linspace(0, 1, len(shares)), shares)))
            elif self.image is not None:
                pictures.append((kind, to_unit(self.image(self.numbers[name], 0, None)[0][0])))
        return pictures

    @property
    def metadata(self) -> dict[str, Any]:
        """Return what is stored with the trained weights because sampling needs it."""
        code = {} if self.code is None else {"numbers": self.code.model_dump(mode="json")}
        values = {"label_values": list(self.label_values)} if self.label_values else {}
        return {**({} if self.normalisation is None else self.normalisation.content("condition")), **code, **values}


def prepare_conditions(
    settings: Settings,
    pairs: Pairs,
    volumes: DataSplit,
    process: Process,
    codec: VolumeCodec,
    known: Normalisation | None = None,
    poses: Poses | None = None,
) -> Conditions | None:
    """Make the conditions of all volumes that are not kept yet; None if there are none besides classes.

    The training volumes decide how condition volumes are normalised, unless the normalisation that a network was
    trained with is `known`. Then only held-out volumes get conditions, those that samples are compared with. Conditions
    are kept on disk with `ldm.latents.cache: disk`, and otherwise in memory: they are about as large as latents. Copies
    of training volumes get conditions in their `poses`.
    """
    scan = settings.ldm.conditioning.scan
    if not (settings.ldm.conditioning.needs_pairs or scan.is_used):
        return None
    readers: dict[str, Read] = {}
    first = 0 if known is None else len(volumes.train)
    image, digest = None, pairs.digest
    if pairs.labels:
        readers[LABEL_MAP] = _label_maps(settings, pairs, process, first, _Entries(volumes, 1, poses))
    if pairs.volumes:
        image = _image(settings, pairs)
        coder = coder_of(settings, codec)
        entries = _Entries(volumes, settings.ldm.conditioning.volume.degrade.variants, poses)
        readers[VOLUME] = _volumes(settings, pairs, process, coder, image, first, entries)
    normalisation = known
    if known is None and VOLUME in readers:
        normalisation = _normalisation(readers[VOLUME], len(volumes.train), settings, process)
    names = [file.name for file in (*volumes.train, *volumes.val)]
    numbers = {name: place for place, name in enumerate(names)}
    code = vectors = None
    if pairs.numbers:
        code = code_of(settings.ldm.conditioning.tabular, pairs.numbers, len(volumes.train))
        vectors = torch.tensor([code.encode(row) for row in pairs.numbers])
    scans = scan_vectors(scan, settings.data, (*volumes.train, *volumes.val), pairs.regions)
    grid = settings.latent_shape[1:]
    values = pairs.label_values
    return Conditions(numbers, readers, grid, digest, normalisation, code, vectors, image, scans, scan.modality, values)


def _label_maps(settings: Settings, pairs: Pairs, process: Process, first: int, entries: _Entries) -> Read:
    number, grid = settings.ldm.conditioning.label_map.num_classes, settings.latent_shape[1:]
    values, made = pairs.label_values, entries.all()

    def shares(entry: int) -> Tensor:
        index, _, copy = made[entry]
        pose = entries.pose(index, copy)
        return torch.from_numpy(label_shares(pairs.labels[index].path, number, settings.data, grid, values, pose))

    names = [entries.name(pairs.labels[index].digest, index, copy) for index, _, copy in made]
    key = ["labels", number, reading_of(settings.data), list(grid), *([list(values)] if values else [])]
    read = keep(shares, names, (number, *grid), key, _is_on_disk(settings), process, "label maps", first)
    return lambda index, variant, copy: read(entries.number(index, variant, copy))


def _image(settings: Settings, pairs: Pairs) -> Image:
    s = settings.ldm.conditioning.volume
    data = volume_reading(settings.data, s)

    def image(index: int, variant: int, pose: Pose | None) -> tuple[Tensor, Tensor | None]:
        file = pairs.volumes[index]
        loaded = load_file(file, data).image
        if pose is not None:
            loaded = in_pose(loaded, pose)
        if not s.is_from_target:
            return loaded, None
        mask = torch.from_numpy(mask_on_grid(pairs.masks[index].path, data, pose)) if pairs.masks else None
        return degraded(loaded, s.degrade, settings.seed, file.digest, variant, mask)

    return image


def _volumes(
    settings: Settings,
    pairs: Pairs,
    process: Process,
    coder: VolumeCodec | None,
    image: Image,
    first: int,
    entries: _Entries,
) -> Read:
    s, grid = settings.ldm.conditioning.volume, settings.latent_shape[1:]
    data, made = volume_reading(settings.data, s), entries.all()

    def channels(entry: int) -> Tensor:
        index, variant, copy = made[entry]
        loaded, unknown = image(index, variant, entries.pose(index, copy))
        return joined_volume(loaded, unknown, encoder_of(coder), grid)

    masks = [file.digest for file in pairs.masks] or [""] * len(pairs.volumes)
    names = [
        entries.name(f"{pairs.volumes[index].digest} {masks[index]} {variant}", index, copy)
        for index, variant, copy in made
    ]
    shape = (s.num_joined(settings.autoencoder.latent_channels), *grid)
    degrade = s.degrade.model_dump(mode="json", include={"downsample", "hole"}) if s.is_from_target else None
    by = None if coder is None else [weights_digest(coder.autoencoder), coder.precision.name]
    intensity = data.model_dump(mode="json", include={"intensity", "frame"})
    seed = settings.seed if s.degrade.has_hole else None
    key = ["volume", reading_of(data), intensity, list(grid), by, degrade, seed]
    first_entry = first * entries.variants
    read = keep(channels, names, shape, key, _is_on_disk(settings), process, "condition volumes", first_entry)
    return lambda index, variant, copy: read(entries.number(index, variant, copy))


def _normalisation(read: Read, num_train: int, settings: Settings, process: Process) -> Normalisation:
    """Return the normalisation of the training volumes' condition volumes, in their first variants."""
    number = settings.ldm.conditioning.volume.num_joined(settings.autoencoder.latent_channels) - 1
    statistics = Statistics(num_train, number)
    with process.raise_on_all_ranks():
        for index in range(process.rank, num_train, process.world_size):
            statistics.add(index, read(index, 0, 0)[:-1])
    return statistics.normalisation(process, may_be_constant=True)


def coder_of(settings: Settings, codec: VolumeCodec) -> VolumeCodec | None:
    """Return the autoencoder of condition volumes, or None if they are averaged as they are."""
    return None if settings.ldm.conditioning.volume.encoding == "resample" else codec


def encoder_of(coder: VolumeCodec | None) -> Encode | None:
    """Return what encodes condition volumes, or None if they are averaged as they are."""
    return None if coder is None else lambda image: coder.encode(image).cpu()


def reading_of(s: DataSettings) -> dict[str, Any]:
    """Return the settings that decide where a voxel lies, as plain values."""
    return s.model_dump(mode="json", include=READING)


def _is_on_disk(settings: Settings) -> bool:
    return settings.ldm.latents.cache == "disk"


def empty_condition(settings: Settings, batch_size: int) -> Condition:
    """Return a condition of zeros in the shape that training uses: class 0, and everything else hidden."""
    conditioning = settings.ldm.conditioning
    classes = None if conditioning.num_embedded_classes is None else torch.zeros(batch_size, dtype=torch.long)
    number = conditioning.num_joined(settings.autoencoder.latent_channels)
    joined = torch.zeros(batch_size, number, *settings.latent_shape[1:]) if number else None
    width = sum(conditioning.tabular.widths)
    numbers, scan = (torch.zeros(batch_size, n) if n else None for n in (width, conditioning.scan.width))
    return Condition(classes, joined, numbers, scan)
