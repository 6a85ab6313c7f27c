"""Prepares the latents that stage 2 trains on: encodes each volume once, keeps it, and batches latents by step.

Whole volumes are encoded: `data.patch_size` applies to stage 1 only. With `data.use_augmentation`, copies of each
training volume in slightly different poses are encoded too, and each sample of the training sequence is the volume or
one of them, with its label map and its condition volume in the same pose. Where numbers are conditions, copies keep
their size, because a number may mean one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data import DataSplit
from data.batches import Batch, BatchPlan, VolumeOrder, one_ahead, training_batches
from data.loading import Pose, in_pose, load_file, random_pose
from diffusion.conditioning import (
    NOTHING,
    ConditionBatch,
    ConditionStore,
    Pairs,
    Preparation,
    kinds_of,
    prepare_conditions,
)
from diffusion.latent_files import TensorCache, digest_of, latent_key, latent_name
from diffusion.normalisation import Normalisation, PretrainedUNet, Statistics, pretrained_unet
from models.frozen_autoencoder import latents_digest
from models.volume_codec import VolumeCodec
from runtime.cli import ProgressBar
from runtime.files import LATENTS, counted, printable
from runtime.processes import Process
from settings import CheckpointError, ConfigError, DataSettings, Settings

log = logging.getLogger(__name__)

NUM_COPIES = 8
"""Augmented copies of each training volume. Their encoding takes as long as so many passes over the data."""

Read = Callable[[int, int], Tensor]
"""Returns a latent by the index of its volume, training volumes first, and the number of a copy; 0: the volume."""


@dataclass(frozen=True)
class LatentBatch:
    """One micro-batch of latents: a `Batch` with their means (B, C, D, H, W) instead of the image, and conditions."""

    mean: Tensor
    positions: tuple[int, ...]
    condition: ConditionBatch = NOTHING

    def pin_memory(self) -> LatentBatch:
        """Return the batch in page-locked memory."""
        return replace(self, mean=self.mean.pin_memory(), condition=self.condition.map(Tensor.pin_memory))


@dataclass(frozen=True)
class VolumeBatch(Batch):
    """A micro-batch of volumes with their conditions, for latents that are not kept."""

    condition: ConditionBatch = NOTHING


@dataclass(frozen=True)
class Latents:
    """The latents of a run: how to read one (None if they are not kept), and facts about the training set.

    `mean_map` is the normalised mean latent of the training volumes; `spacing_mm`, `lower` and `upper` are medians over
    them. `autoencoder` is the hash of the weights that they depend on. With `pin_memory`, training batches are in
    page-locked memory, from which a GPU copies without making the host wait. `conditions` come from the volumes'
    partners. In runs that fill holes, `voxel_effects` (C, 1, 1, 1) say how much an error in each channel of a
    normalised latent changes voxels, with mean 1.
    """

    volumes: DataSplit
    settings: DataSettings
    read: Read | None
    normalisation: Normalisation
    mean_map: Tensor
    spacing_mm: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    autoencoder: str
    pin_memory: bool = False
    conditions: ConditionStore = field(default_factory=ConditionStore)
    num_copies: int = 0
    voxel_effects: Tensor | None = None

    def training_batches(
        self, plan: BatchPlan, first_step: int, last_step: int
    ) -> Iterator[Sequence[LatentBatch | VolumeBatch]]:
        """Yield the micro-batches of each step in [first_step, last_step): latents, or volumes if none are kept.

        Volumes and order are those of `training_batches`. A thread reads the next step's latents during the current
        step.
        """
        number = len(self.volumes.train)
        order = VolumeOrder(plan.seed, number)

        def read_latents(read: Read, chunk: Sequence[int]) -> LatentBatch:
            passes = [position // number for position in chunk]
            indices = [order(position) for position in chunk]
            most = self.num_copies
            copies = [int(plan.sample_rng(p).integers(0, most, endpoint=True)) if most else 0 for p in chunk]
            latents = [read(index, copy) for index, copy in zip(indices, copies, strict=True)]
            batch = LatentBatch(torch.stack(latents), tuple(chunk), self.conditions.batch(indices, copies, passes))
            return batch.pin_memory() if self.pin_memory else batch

        def with_condition(batch: Batch) -> VolumeBatch:
            passes = [position // number for position in batch.positions]
            condition = self.conditions.batch([order(position) for position in batch.positions], passes=passes)
            return VolumeBatch(batch.image, batch.positions, batch.files, condition)

        if (read := self.read) is None:
            steps = training_batches(self.volumes.train, self.settings, plan, first_step, last_step)
            return ([with_condition(batch) for batch in batches] for batches in steps)
        chunks = ([plan.positions(step, n) for n in range(plan.accumulation)] for step in range(first_step, last_step))
        return one_ahead([read_latents(read, chunk) for chunk in of_step] for of_step in chunks)

    def validation_batches(
        self, encode: Callable[[Tensor], Tensor], process: Process, batch_size: int = 1
    ) -> Iterator[LatentBatch]:
        """Yield this process's share of the validation latents; positions index the list of files."""
        share = range(process.rank, len(self.volumes.val), process.world_size)
        for start in range(0, len(share), batch_size):
            chosen = share[start : start + batch_size]
            indices = [len(self.volumes.train) + place for place in chosen]
            latents = [self.latent(index, encode) for index in indices]
            yield LatentBatch(torch.stack(latents), tuple(chosen), self.conditions.batch(indices))

    def held_out_condition(self, positions: Sequence[int]) -> ConditionBatch:
        """Return the conditions of samples: those of the held-out volumes in turn."""
        return self.conditions.batch([self.held_out_index(position) for position in positions])

    def held_out_index(self, position: int) -> int:
        """Return the index of the held-out volume whose conditions a sample has."""
        return len(self.volumes.train) + position % len(self.volumes.val)

    def latent(self, index: int, encode: Callable[[Tensor], Tensor], copy: int = 0) -> Tensor:
        """Return the mean of a volume's latent by its index, held-out volumes after training volumes."""
        if self.read is not None:
            return self.read(index, copy)
        file = (*self.volumes.train, *self.volumes.val)[index]
        return encode(load_file(file, self.settings).image)

    @property
    def metadata(self) -> dict[str, Any]:
        """Return what is stored with the trained weights because sampling needs it."""
        names = ("spacing_mm", "lower", "upper", "autoencoder")
        own = {name: getattr(self, name) for name in names}
        return {**own, "class_names": self.volumes.class_names, **self.conditions.metadata}


def stage_two_data(s: DataSettings) -> DataSettings:
    """Return the data settings of stage 2: whole volumes without augmentation."""
    return s.model_copy(update={"patch_size": None, "use_augmentation": False})


def prepare_latents(
    codec: VolumeCodec,
    volumes: DataSplit,
    settings: Settings,
    process: Process,
    pairs: Pairs | None = None,
    learned: Mapping[str, Any] | None = None,
) -> Latents:
    """Encode the volumes that are not encoded yet, shared among the processes, and find how to normalise them.

    With `cache: disk` an interrupted encoding continues where it stopped, and every run with the same autoencoder
    weights and the same reading of the data reuses the latents. Only training volumes count for the normalisation. A
    pretrained U-Net keeps its own. `learned` is what a trained network knows of its conditions.
    """
    data, train = stage_two_data(settings.data), volumes.train
    if settings.data.patch_size is not None:
        log.info("stage 2 trains on whole volumes; data.patch_size applies to stage 1 only")
    if settings.data.use_augmentation and settings.ldm.latents.cache == "none":
        raise ConfigError(
            "ldm.latents.cache: none with data.use_augmentation: true; the latents of augmented copies are encoded "
            "once and kept; set disk or memory, or turn augmentation off"
        )
    start = pretrained_unet(settings)
    if start is not None:
        start.check_autoencoder(codec.autoencoder)
        if learned is None and settings.ldm.conditioning.label_map.controlnet:
            learned = _learned_by(start, settings)
    num_copies = NUM_COPIES if settings.data.use_augmentation else 0
    autoencoder = latents_digest(codec.autoencoder)
    folder = LATENTS / latent_key(data, autoencoder, codec.precision.name)
    statistics = Statistics(len(train), settings.latent_shape)
    read, facts = _encode(codec, volumes, settings, folder, num_copies, statistics, process)
    normalisation = statistics.normalisation(process) if start is None else start.normalisation
    deviations = ", ".join(f"{1 / scale:.4g}" for scale in normalisation.scale.flatten().tolist())
    source = counted(len(train), "training volume") if start is None else f"what {start.path} was trained on"
    log.info("latents: standard deviation by channel %s, from %s", deviations, source)

    def pose(index: int, copy: int) -> Pose:
        return pose_of(settings, digest_of(train[index]), facts[index, :3].tolist(), copy)

    medians = np.median(facts[: len(train)].numpy(), axis=0)
    spacing_mm, lower, upper = np.split(medians, [3, 3 + settings.autoencoder.in_channels])
    preparation = Preparation(settings, volumes, process, codec, learned, num_copies, pose)
    mean_map = normalisation.apply(statistics.mean_latent(process))
    has_holes = settings.ldm.conditioning.volume.has_hole
    return Latents(
        volumes,
        data,
        read,
        normalisation,
        mean_map=mean_map,
        spacing_mm=tuple(spacing_mm.tolist()),
        lower=tuple(lower.tolist()),
        upper=tuple(upper.tolist()),
        autoencoder=autoencoder,
        pin_memory=bool(data.pin_memory) and process.device.type == "cuda",
        conditions=prepare_conditions(pairs or {}, preparation),
        num_copies=num_copies,
        voxel_effects=voxel_effects(codec, normalisation, mean_map) if has_holes else None,
    )


def _learned_by(unet: PretrainedUNet, settings: Settings) -> dict[str, Any]:
    """Return what a frozen U-Net knows of its conditions: other volumes must not change what a number means to it."""
    try:
        return {kind.name: kind.learned(unet.metadata, settings) for kind in kinds_of(settings.ldm.conditioning)}
    except ValueError as error:
        reason = printable(str(error).splitlines()[0])
        raise CheckpointError(
            f"{unet.path}: does not say how the U-Net's conditions are coded ({reason}); "
            "give the ldm.safetensors of the run that trained it"
        ) from None


def voxel_effects(codec: VolumeCodec, normalisation: Normalisation, mean_map: Tensor) -> Tensor:
    """Return `Latents.voxel_effects`: what noise in each channel of the mean latent changes, as a mean square."""
    noise = torch.randn(mean_map.shape[1:], generator=torch.Generator().manual_seed(0))
    mean = codec.decode(normalisation.undo(mean_map))
    noisy = [mean_map + one.view(-1, 1, 1, 1) * noise for one in torch.eye(len(mean_map))]
    effects = torch.stack([(codec.decode(normalisation.undo(latent)) - mean).square().mean() for latent in noisy])
    if not bool(effects.sum() > 0):
        raise CheckpointError("the decoder gives the same volume for every latent; train stage 1 longer, or again")
    return (effects / effects.mean()).cpu().view(-1, 1, 1, 1)


def _encode(
    codec: VolumeCodec,
    volumes: DataSplit,
    settings: Settings,
    place: Path,
    num_copies: int,
    statistics: Statistics,
    process: Process,
) -> tuple[Read | None, Tensor]:
    """Encode all volumes, and copies of the training volumes, that are not in the folder; the processes share the work.

    Return how to read them, and for each volume a row with the spacing on the network's grid and the intensities of
    each channel that map to the ends of the network's range. What is encoded is added to `statistics`.
    """
    files, num_train = (*volumes.train, *volumes.val), len(volumes.train)
    data, mode = stage_two_data(settings.data), settings.ldm.latents.cache
    copies = [range(1 + (num_copies if index < num_train else 0)) for index in range(len(files))]
    facts = torch.zeros(len(files), 3 + 2 * settings.autoencoder.in_channels, dtype=torch.float64)

    def name(index: int, copy: int) -> str:
        return latent_name(files[index], copy, settings.ldm.conditioning.copies_scale)

    def read(index: int, copy: int) -> Tensor:
        return cache.read(f"latent of {printable(files[index].name)}", index, copy)

    entries = [(index, copy) for index in range(len(files)) for copy in copies[index]]
    cache = TensorCache(place, settings.latent_shape, name, entries if mode == "memory" else ())
    share = range(process.rank, len(files), process.world_size)
    with process.raise_on_all_ranks():
        missing = {}
        for index in share:
            found = [cache.find(index, copy) if mode == "disk" else None for copy in copies[index]]
            missing[index] = [copy for copy in copies[index] if found[copy] is None]
            if (whole := found[0]) is not None:
                statistics.add(index, whole[0])
                facts[index] = torch.tensor(whole[1], dtype=torch.float64)
        incomplete = [index for index in share if missing[index]]
        if mode == "disk" and len(incomplete) < len(share):
            log.info("latents: %d of %d found in %s", len(share) - len(incomplete), len(share), place)
        loading = one_ahead((index, load_file(files[index], data)) for index in incomplete)
        is_hidden = not (process.is_rank_zero and incomplete)
        bar = ProgressBar(loading, total=len(incomplete), desc="encoding latents", unit="volume", disable=is_hidden)
        for index, loaded in bar:
            spacing_mm = loaded.geometry.spacing_mm.tolist()
            known = [*spacing_mm, *loaded.lower, *loaded.upper]
            facts[index] = torch.tensor(known, dtype=torch.float64)
            for copy in missing[index]:
                pose = pose_of(settings, loaded.digest, spacing_mm, copy) if copy else None
                mean = codec.encode(loaded.image if pose is None else in_pose(loaded.image, pose)).cpu()
                if mode != "none":
                    cache.write(f"latent of {printable(files[index].name)}", mean, index, copy, facts=known)
                if copy == 0:
                    statistics.add(index, mean)

    cache.share(process)
    # One process fills each row and the others leave zeros, so the sum is the same for any number of processes.
    return None if mode == "none" else read, process.sum(facts)


def pose_of(settings: Settings, digest: str, spacing_mm: Sequence[float], copy: int) -> Pose:
    """Return the pose of a volume's copy, by the volume's content, so that every run finds the same copies."""
    rng = np.random.default_rng([int(digest[:16], 16), copy])
    return random_pose(np.array(spacing_mm), rng, settings.ldm.conditioning.copies_scale)
