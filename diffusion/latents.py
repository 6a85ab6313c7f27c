"""Prepares the latents that stage 2 trains on: encodes each volume once, keeps it, and finds their normalisation.

Whole volumes are encoded: `data.patch_size` applies to stage 1 only. With `data.use_augmentation`, copies of each
training volume in slightly different poses are encoded too, and each sample of the training sequence is the volume or
one of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from data import Batch, BatchPlan, DataSplit, LoadedVolume, VolumeFile, load_file, posed_anew, training_batches
from data.pairs.pairs import NO_PAIRS, Pairs
from diffusion.conditioning.conditions import Conditions, prepare_conditions
from diffusion.frozen_autoencoder import latents_digest
from diffusion.latent_batches import LatentBatch, collate, latent_batches, with_conditions
from diffusion.latent_files import LatentFacts, LatentFolder, latent_key
from diffusion.normalisation import MeanLatent, Normalisation, Statistics
from diffusion.pretrained import pretrained_unet
from diffusion.volume_codec import VolumeCodec
from runtime.processes import Process
from settings import ConfigError, DataSettings, Settings
from storage.names import counted
from storage.run_folder import LATENTS

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
    memory. `conditions` come from the volumes' partners.
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
    conditions: Conditions | None = None
    num_copies: int = 0

    def training_batches(
        self, plan: BatchPlan, first_step: int, last_step: int
    ) -> Iterator[Sequence[LatentBatch | Batch]]:
        """Yield the micro-batches of each step: latents, or volumes if latents are not kept."""
        if self.read is None:
            volumes = training_batches(self.volumes.train, self.settings, plan, first_step, last_step)
            return (
                volumes
                if self.conditions is None
                else with_conditions(volumes, self.conditions, len(self.volumes.train))
            )
        files, conditions, read_copy = self.volumes.train, self.conditions, self.read

        def read(index: int, position: int) -> Tensor:
            copy = int(plan.sample_rng(position).integers(0, self.num_copies, endpoint=True)) if self.num_copies else 0
            return read_copy(index, copy)

        return latent_batches(read, files, plan, first_step, last_step, self.pin_memory, conditions)

    def validation_batches(
        self, encode: Callable[[Tensor], Tensor], process: Process, batch_size: int = 1
    ) -> Iterator[LatentBatch]:
        """Yield this process's share of the validation latents; positions index the list of files."""
        files, offset = self.volumes.val, len(self.volumes.train)
        share = range(process.rank, len(files), process.world_size)

        for start in range(0, len(share), batch_size):
            chosen = share[start : start + batch_size]
            latents = [self.latent(offset + index, encode) for index in chosen]
            yield collate(latents, files, chosen, chosen, self.conditions)

    def latent(self, index: int, encode: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the mean of a volume's latent by its index, held-out volumes after training volumes."""
        if self.read is not None:
            return self.read(index, 0)
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
    pairs: Pairs = NO_PAIRS,
) -> Latents:
    """Encode the volumes that are not encoded yet, shared among the processes, and find how to normalise them.

    With `cache: disk` an interrupted encoding continues where it stopped, and every run with the same autoencoder
    weights and the same reading of the data reuses the latents. Only training volumes count for the normalisation. A
    pretrained U-Net keeps its own.
    """
    data = stage_two_data(settings.data)
    if settings.data.patch_size is not None:
        log.info("stage 2 trains on whole volumes; data.patch_size applies to stage 1 only")
    files = (*volumes.train, *volumes.val)
    cache = settings.ldm.latents.cache
    autoencoder = latents_digest(codec.autoencoder)
    key = latent_key(data, autoencoder, codec.precision.name)
    folder = LatentFolder(LATENTS / key, settings.latent_shape)
    table = torch.zeros(len(files), 3 + 2 * settings.autoencoder.in_channels, dtype=torch.float64)
    kept = torch.zeros(len(files), *settings.latent_shape) if cache == "memory" else None
    start = pretrained_unet(settings)
    if start is not None:
        start.check_autoencoder(codec.autoencoder)
    statistics = Statistics(len(volumes.train), settings.autoencoder.latent_channels)
    mean_latent = MeanLatent(len(volumes.train), settings.latent_shape)
    num_copies = _num_copies(settings)

    share = list(range(process.rank, len(files), process.world_size))
    with process.together():
        facts = {index: folder.facts(files[index]) if cache == "disk" else None for index in share}
    missing = [index for index in share if facts[index] is None]
    if cache == "disk" and len(missing) < len(share):
        log.info("latents: %d of %d found in %s", len(share) - len(missing), len(share), folder.folder)
    with process.together():
        for index, loaded in _load_ahead(files, missing, data, process):
            mean = codec.encode(loaded.image).cpu()
            known = LatentFacts(tuple(loaded.geometry.spacing_mm.tolist()), loaded.lower, loaded.upper)
            facts[index] = known
            if cache == "disk":
                folder.write(files[index], mean, known)
            elif kept is not None:
                kept[index] = mean
            statistics.add(index, mean)
            mean_latent.add(index, mean)
        for index in set(share) - set(missing):
            statistics.add(index, mean := folder.read(files[index]))
            mean_latent.add(index, mean)
        copies = _encode_copies(codec, volumes.train, data, folder, num_copies, cache, process)
    for index, found in facts.items():
        assert found is not None, f"volume {index} was not encoded"
        table[index] = torch.tensor(found.to_row(), dtype=torch.float64)

    # One process fills each row and the others leave zeros, so the sum is the same for any number of processes.
    rows = [LatentFacts.from_row(row) for row in process.sum(table).tolist()]
    read = _reader(folder, files, None if kept is None else process.sum(kept), copies) if cache != "none" else None
    train = rows[: len(volumes.train)]
    normalisation = statistics.normalisation(process) if start is None else start.normalisation
    mean_map = normalisation.apply(mean_latent.over_all(process))
    deviations = ", ".join(f"{1 / scale:.4g}" for scale in normalisation.scale.flatten().tolist())
    source = counted(len(train), "training volume") if start is None else f"what {start.path} was trained on"
    log.info("latents: standard deviation by channel %s, from %s", deviations, source)
    pin_memory = bool(data.pin_memory) and process.device.type == "cuda"
    conditions = prepare_conditions(settings, pairs, volumes, process, codec)
    facts_of_all = (*_medians(train), autoencoder, pin_memory, conditions, num_copies)
    return Latents(volumes, data, read, normalisation, mean_map, *facts_of_all)


def _medians(rows: Sequence[LatentFacts]) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Return the medians of spacing, lower and upper."""
    spacing_mm, lower, upper = (
        tuple(map(float, np.median([getattr(row, name) for row in rows], axis=0)))
        for name in ("spacing_mm", "lower", "upper")
    )
    return spacing_mm, lower, upper


def _reader(
    folder: LatentFolder, files: Sequence[VolumeFile], kept: Tensor | None, copies: Tensor | None
) -> Callable[[int, int], Tensor]:
    if kept is None:
        return lambda index, copy: folder.read(files[index], copy)
    return lambda index, copy: kept[index] if copy == 0 or copies is None else copies[index, copy - 1]


def _num_copies(settings: Settings) -> int:
    """Return how many augmented copies of each training volume stage 2 trains on."""
    if not settings.data.use_augmentation:
        return 0
    if settings.ldm.latents.cache == "none":
        raise ConfigError(
            "ldm.latents.cache: none with data.use_augmentation: true; the latents of augmented copies are encoded "
            "once and kept; set disk or memory, or turn augmentation off"
        )
    if settings.ldm.conditioning.num_joined(settings.autoencoder.latent_channels):
        log.info("stage 2 does not augment: label maps and condition volumes would no longer match their volumes")
        return 0
    return NUM_COPIES


def _encode_copies(
    codec: VolumeCodec,
    files: Sequence[VolumeFile],
    data: DataSettings,
    folder: LatentFolder,
    num_copies: int,
    cache: str,
    process: Process,
) -> Tensor | None:
    """Encode the augmented copies of the training volumes; return them (N, copies, C, D, H, W) if memory keeps them."""
    if not num_copies:
        return None
    kept = torch.zeros(len(files), num_copies, *folder.shape) if cache == "memory" else None
    numbers = range(1, num_copies + 1)
    missing = list(range(process.rank, len(files), process.world_size))
    if kept is None:
        missing = [index for index in missing if any(folder.facts(files[index], copy) is None for copy in numbers)]
    for index, loaded in _load_ahead(files, missing, data, process, "encoding augmented latents"):
        facts = LatentFacts(tuple(loaded.geometry.spacing_mm.tolist()), loaded.lower, loaded.upper)
        for copy in numbers:
            # By content, so that every run with the same volume finds the same copies.
            rng = np.random.default_rng([int(loaded.digest[:16], 16), copy])
            mean = codec.encode(posed_anew(loaded.image, loaded.geometry.spacing_mm, rng)).cpu()
            if kept is None:
                folder.write(files[index], mean, facts, copy)
            else:
                kept[index, copy - 1] = mean
    return None if kept is None else process.sum(kept)


def _load_ahead(
    files: Sequence[VolumeFile],
    indices: Sequence[int],
    data: DataSettings,
    process: Process,
    what: str = "encoding latents",
) -> Iterator[tuple[int, LoadedVolume]]:
    """Yield volumes in order, with a progress bar, while threads read the next ones."""
    threads = 1 if data.num_workers == "auto" else max(1, data.num_workers)

    # Passed only to hide the bar, because an explicit disable=False would override --quiet.
    hidden: dict[str, Any] = {} if process.is_first and indices else {"disable": True}
    bar = tqdm(total=len(indices), desc=what, unit="volume", **hidden)
    with ThreadPoolExecutor(threads, thread_name_prefix="volumes") as readers, bar:
        waiting = [readers.submit(load_file, files[index], data) for index in indices[: threads + 1]]
        for place, index in enumerate(indices):
            loaded = waiting.pop(0).result()
            if place + threads + 1 < len(indices):
                waiting.append(readers.submit(load_file, files[indices[place + threads + 1]], data))
            yield index, loaded
            bar.update(1)
