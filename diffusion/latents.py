"""Prepares the latents that stage 2 trains on: encodes each volume once, keeps it, and finds their normalisation.

Whole volumes are encoded: `data.patch_size` applies to stage 1 only. With `data.use_augmentation`, copies of each
training volume in slightly different poses are encoded too, and each sample of the training sequence is the volume or
one of them, with its label map and its condition volume in the same pose. Where numbers are conditions, copies keep
their size, because a number may mean one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data import Batch, BatchPlan, DataSplit, LoadedVolume, VolumeFile, in_pose, load_file, training_batches
from data.loading import Pose, random_pose
from diffusion.conditioning import (
    NOTHING,
    ConditionBatch,
    ConditionStore,
    Pairs,
    Preparation,
    prepare_conditions,
)
from diffusion.latent_batches import LatentBatch, latent_batches, with_conditions
from diffusion.latent_files import LatentFacts, LatentFolder, digest_of, latent_key
from diffusion.normalisation import MeanLatent, Normalisation, Statistics
from diffusion.pretrained import pretrained_unet
from models.frozen_autoencoder import latents_digest
from models.volume_codec import VolumeCodec
from runtime.cli.bars import ProgressBar
from runtime.files import LATENTS, counted
from runtime.processes import Process
from settings import CheckpointError, ConfigError, DataSettings, Settings

__all__ = ["Latents", "prepare_latents", "pretrained_unet", "stage_two_data"]

log = logging.getLogger(__name__)

NUM_COPIES = 8
"""Augmented copies of each training volume. Their encoding takes as long as so many passes over the data."""


@dataclass(frozen=True)
class Latents:
    """The latents of a run: how to read one (None if they are not kept), and facts about the training set.

    `read` takes the index of a volume and the number of a copy, where 0 is the volume itself. `mean_map` is the
    normalised mean latent of the training volumes; `spacing_mm`, `lower` and `upper` are medians over them.
    `autoencoder` is the hash of the weights that they depend on. With `pin_memory`, training batches are in page-locked
    memory. `conditions` come from the volumes' partners. In runs that fill holes, `voxel_effects` (C, 1, 1, 1) say how
    much an error in each channel of a normalised latent changes voxels, with mean 1.
    """

    volumes: DataSplit
    settings: DataSettings
    read: Callable[[int, int], Tensor] | None
    normalisation: Normalisation
    mean_map: Tensor
    spacing_mm: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    autoencoder: str
    pin_memory: bool = False
    conditions: ConditionStore | None = None
    num_copies: int = 0
    voxel_effects: Tensor | None = None

    def training_batches(
        self, plan: BatchPlan, first_step: int, last_step: int
    ) -> Iterator[Sequence[LatentBatch | Batch]]:
        """Yield the micro-batches of each step: latents, or volumes if latents are not kept."""
        if self.read is None:
            volumes = training_batches(self.volumes.train, self.settings, plan, first_step, last_step)
            if self.conditions is None:
                return volumes
            return with_conditions(volumes, self.conditions, plan.seed, len(self.volumes.train))

        def copy_at(position: int) -> int:
            return int(plan.sample_rng(position).integers(0, self.num_copies, endpoint=True)) if self.num_copies else 0

        number, pin = len(self.volumes.train), self.pin_memory
        return latent_batches(self.read, number, plan, first_step, last_step, pin, self.conditions, copy_at)

    def validation_batches(
        self, encode: Callable[[Tensor], Tensor], process: Process, batch_size: int = 1
    ) -> Iterator[LatentBatch]:
        """Yield this process's share of the validation latents; positions index the list of files."""
        share = range(process.rank, len(self.volumes.val), process.world_size)

        for start in range(0, len(share), batch_size):
            chosen = share[start : start + batch_size]
            indices = [len(self.volumes.train) + place for place in chosen]
            latents = [self.latent(index, encode) for index in indices]
            yield LatentBatch(torch.stack(latents), tuple(chosen), self.condition(indices))

    def condition(self, indices: Sequence[int], copies: Sequence[int] | None = None) -> ConditionBatch:
        """Return the conditions of volumes by their indices, held-out volumes after training volumes."""
        return NOTHING if self.conditions is None else self.conditions.batch(indices, copies=copies)

    def held_out_condition(self, positions: Sequence[int]) -> ConditionBatch:
        """Return the conditions of samples: those of the held-out volumes in turn."""
        return self.condition([self.held_out_index(position) for position in positions])

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
        return {
            "spacing_mm": self.spacing_mm,
            "lower": self.lower,
            "upper": self.upper,
            "class_names": self.volumes.class_names,
            "autoencoder": self.autoencoder,
            **({} if self.conditions is None else self.conditions.metadata),
        }


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
    data = stage_two_data(settings.data)
    if settings.data.patch_size is not None:
        log.info("stage 2 trains on whole volumes; data.patch_size applies to stage 1 only")
    start = pretrained_unet(settings)
    if start is not None:
        start.check_autoencoder(codec.autoencoder)
    num_copies = _num_copies(settings)
    autoencoder = latents_digest(codec.autoencoder)
    key = latent_key(data, autoencoder, codec.precision.name)
    folder = LatentFolder(LATENTS / key, settings.latent_shape, settings.ldm.conditioning.copies_scale)
    encoded = _encode(codec, volumes, settings, folder, num_copies, process)
    train = encoded.facts[: len(volumes.train)]
    normalisation = encoded.statistics.normalisation(process) if start is None else start.normalisation
    deviations = ", ".join(f"{1 / scale:.4g}" for scale in normalisation.scale.flatten().tolist())
    source = counted(len(train), "training volume") if start is None else f"what {start.path} was trained on"
    log.info("latents: standard deviation by channel %s, from %s", deviations, source)

    def pose(index: int, copy: int) -> Pose:
        return pose_of(settings, digest_of(volumes.train[index]), train[index].spacing_mm, copy)

    spacing_mm, lower, upper = _medians(train)
    preparation = Preparation(settings, volumes, process, codec, learned, num_copies, pose)
    mean_map = normalisation.apply(encoded.mean_latent.over_all(process))
    has_holes = settings.ldm.conditioning.volume.has_hole
    return Latents(
        volumes,
        data,
        encoded.read,
        normalisation,
        mean_map=mean_map,
        spacing_mm=spacing_mm,
        lower=lower,
        upper=upper,
        autoencoder=autoencoder,
        pin_memory=bool(data.pin_memory) and process.device.type == "cuda",
        conditions=prepare_conditions(pairs or {}, preparation),
        num_copies=num_copies,
        voxel_effects=voxel_effects(codec, normalisation, mean_map) if has_holes else None,
    )


def voxel_effects(codec: VolumeCodec, normalisation: Normalisation, mean_map: Tensor) -> Tensor:
    """Return `Latents.voxel_effects`: what noise in each channel of the mean latent changes, as a mean square."""
    noise = torch.randn(mean_map.shape[1:], generator=torch.Generator().manual_seed(0))
    mean = codec.decode(normalisation.undo(mean_map))
    noisy = [mean_map + one.view(-1, 1, 1, 1) * noise for one in torch.eye(len(mean_map))]
    effects = torch.stack([(codec.decode(normalisation.undo(latent)) - mean).square().mean() for latent in noisy])
    if not bool(effects.sum() > 0):
        raise CheckpointError("the decoder gives the same volume for every latent; train stage 1 longer, or again")
    return (effects / effects.mean()).cpu().view(-1, 1, 1, 1)


@dataclass(frozen=True)
class _Encoded:
    """The encoded volumes: how to read them, as `Latents` does, facts about each, and what normalises them."""

    read: Callable[[int, int], Tensor] | None
    facts: list[LatentFacts]
    statistics: Statistics
    mean_latent: MeanLatent


def _encode(
    codec: VolumeCodec,
    volumes: DataSplit,
    settings: Settings,
    folder: LatentFolder,
    num_copies: int,
    process: Process,
) -> _Encoded:
    """Encode all volumes, and copies of the training volumes, that are not on disk; the processes share the work."""
    files, num_train = (*volumes.train, *volumes.val), len(volumes.train)
    data, cache = stage_two_data(settings.data), settings.ldm.latents.cache
    statistics = Statistics(num_train, settings.autoencoder.latent_channels)
    mean_latent = MeanLatent(num_train, settings.latent_shape)
    table = torch.zeros(len(files), 3 + 2 * settings.autoencoder.in_channels, dtype=torch.float64)
    kept = torch.zeros(len(files) + num_train * num_copies, *settings.latent_shape) if cache == "memory" else None

    def row(index: int, copy: int) -> int:
        return index if copy == 0 else len(files) + index * num_copies + copy - 1

    share = range(process.rank, len(files), process.world_size)
    with process.raise_on_all_ranks():
        missing = {}
        for index in share:
            copies = range(1 + (num_copies if index < num_train else 0))
            found = {copy: folder.find(files[index], copy) if cache == "disk" else None for copy in copies}
            missing[index] = [copy for copy in copies if found[copy] is None]
            if (whole := found[0]) is not None:
                mean, known = whole
                table[index] = torch.tensor(known.to_row(), dtype=torch.float64)
                statistics.add(index, mean)
                mean_latent.add(index, mean)
        incomplete = [index for index in share if missing[index]]
        if cache == "disk" and len(incomplete) < len(share):
            log.info("latents: %d of %d found in %s", len(share) - len(incomplete), len(share), folder.folder)
        for index, loaded in _load_ahead(files, incomplete, data, process):
            known = LatentFacts(tuple(loaded.geometry.spacing_mm.tolist()), loaded.lower, loaded.upper)
            table[index] = torch.tensor(known.to_row(), dtype=torch.float64)
            for copy in missing[index]:
                pose = pose_of(settings, loaded.digest, known.spacing_mm, copy) if copy else None
                mean = codec.encode(loaded.image if pose is None else in_pose(loaded.image, pose)).cpu()
                if cache == "disk":
                    folder.write(files[index], mean, known, copy)
                elif kept is not None:
                    kept[row(index, copy)] = mean
                if copy == 0:
                    statistics.add(index, mean)
                    mean_latent.add(index, mean)

    # One process fills each row and the others leave zeros, so the sum is the same for any number of processes.
    facts_of_all = [LatentFacts.from_row(values) for values in process.sum(table).tolist()]
    read: Callable[[int, int], Tensor] | None = None
    if cache == "disk":
        read = lambda index, copy: folder.read(files[index], copy)  # noqa: E731
    elif kept is not None:
        rows = process.sum(kept)
        read = lambda index, copy: rows[row(index, copy)]  # noqa: E731
    return _Encoded(read, facts_of_all, statistics, mean_latent)


def pose_of(settings: Settings, digest: str, spacing_mm: Sequence[float], copy: int) -> Pose:
    """Return the pose of a volume's copy, by the volume's content, so that every run finds the same copies."""
    rng = np.random.default_rng([int(digest[:16], 16), copy])
    return random_pose(np.array(spacing_mm), rng, settings.ldm.conditioning.copies_scale)


def _medians(rows: Sequence[LatentFacts]) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Return the medians of spacing, lower and upper."""
    spacing_mm, lower, upper = (
        tuple(map(float, np.median([getattr(row, name) for row in rows], axis=0)))
        for name in ("spacing_mm", "lower", "upper")
    )
    return spacing_mm, lower, upper


def _num_copies(settings: Settings) -> int:
    """Return how many augmented copies of each training volume stage 2 trains on."""
    if not settings.data.use_augmentation:
        return 0
    if settings.ldm.latents.cache == "none":
        raise ConfigError(
            "ldm.latents.cache: none with data.use_augmentation: true; the latents of augmented copies are encoded "
            "once and kept; set disk or memory, or turn augmentation off"
        )
    return NUM_COPIES


def _load_ahead(
    files: Sequence[VolumeFile],
    indices: Sequence[int],
    data: DataSettings,
    process: Process,
) -> Iterator[tuple[int, LoadedVolume]]:
    """Yield volumes in order, with a progress bar, while threads read the next ones."""
    threads = 1 if data.num_workers == "auto" else max(1, data.num_workers)

    # Passed only to hide the bar, because an explicit disable=False would override --quiet.
    hidden: dict[str, Any] = {} if process.is_rank_zero and indices else {"disable": True}
    bar = ProgressBar(total=len(indices), desc="encoding latents", unit="volume", **hidden)
    with ThreadPoolExecutor(threads, thread_name_prefix="volumes") as readers, bar:
        waiting = [readers.submit(load_file, files[index], data) for index in indices[: threads + 1]]
        for place, index in enumerate(indices):
            loaded = waiting.pop(0).result()
            if place + threads + 1 < len(indices):
                waiting.append(readers.submit(load_file, files[indices[place + threads + 1]], data))
            yield index, loaded
            bar.update(1)
