"""Batches of latents, addressed by step like the batches of volumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.batches import Batch, BatchPlan, VolumeOrder
from data.volumes import VolumeFile
from data.workers import one_ahead
from diffusion.conditioning import NOTHING, Condition
from diffusion.conditioning.conditions import Conditions
from settings.conditioning import ConditioningSettings


@dataclass(frozen=True)
class LatentBatch:
    """One micro-batch of latents: a `Batch` with their means (B, C, D, H, W) instead of the image.

    `condition` holds what comes from the volumes' partners; the classes are in `labels`.
    """

    mean: Tensor
    positions: tuple[int, ...]
    labels: Tensor | None
    files: tuple[str, ...]
    condition: Condition = NOTHING

    def pin_memory(self) -> LatentBatch:
        """Return the batch in page-locked memory."""
        labels = None if self.labels is None else self.labels.pin_memory()
        condition = self.condition.map(Tensor.pin_memory)
        return replace(self, mean=self.mean.pin_memory(), labels=labels, condition=condition)


@dataclass(frozen=True)
class VolumeBatch(Batch):
    """A micro-batch of volumes with their conditions, for latents that are not kept."""

    condition: Condition = NOTHING


def latent_batches(
    read: Callable[[int, int], Tensor],
    files: Sequence[VolumeFile],
    plan: BatchPlan,
    first_step: int,
    last_step: int,
    pin_memory: bool = False,
    conditions: Conditions | None = None,
    copy_at: Callable[[int], int] = lambda position: 0,
) -> Iterator[list[LatentBatch]]:
    """Yield the micro-batches of each step in [first_step, last_step).

    `read` returns the latent of a file by its index and the number of its copy, which `copy_at` tells for a position
    of the run's sequence of samples.

    Volumes and order are those of `training_batches`. A thread reads the next step's latents during the current step
    and, with `pin_memory`, puts them into page-locked memory, from which a GPU copies without making the host wait.
    """
    assert files, "training needs at least one volume"
    order = VolumeOrder(plan.seed, len(files))

    def training_batch(chunk: Sequence[int]) -> LatentBatch:
        passes = [position // len(files) for position in chunk]
        indices = [order(position) for position in chunk]
        copies = [copy_at(position) for position in chunk]
        latents = [read(index, copy) for index, copy in zip(indices, copies, strict=True)]
        return collate(latents, files, indices, chunk, conditions, passes, copies)

    def load(step: int) -> list[LatentBatch]:
        chunks = [plan.positions(step, micro_batch) for micro_batch in range(plan.accumulation)]
        batches = [training_batch(chunk) for chunk in chunks]
        return [batch.pin_memory() for batch in batches] if pin_memory else batches

    yield from one_ahead(map(load, range(first_step, last_step)))


def collate(
    latents: Sequence[Tensor],
    files: Sequence[VolumeFile],
    indices: Sequence[int],
    positions: Sequence[int],
    conditions: Conditions | None = None,
    passes: Sequence[int] | None = None,
    copies: Sequence[int] | None = None,
) -> LatentBatch:
    """Return latents, those of the files at `indices`, as one batch, with their conditions as `Conditions.of` does."""
    labels = [files[index].label for index in indices]
    names = tuple(files[index].name for index in indices)
    return LatentBatch(
        mean=torch.stack(list(latents)),
        positions=tuple(positions),
        labels=None if None in labels else torch.tensor(labels, dtype=torch.long),
        files=names,
        condition=NOTHING if conditions is None else conditions.of(names, passes, copies),
    )


def condition_of(batch: LatentBatch | Batch, s: ConditioningSettings) -> Condition:
    """Return the batch's conditions, its classes among them."""
    paired = batch.condition if isinstance(batch, LatentBatch | VolumeBatch) else NOTHING
    assert batch.labels is not None or s.type != "class", "a class-conditional network needs labels"
    return replace(paired, classes=batch.labels) if s.type == "class" else paired


def with_conditions(
    steps: Iterator[list[Batch]], conditions: Conditions, num_volumes: int
) -> Iterator[list[VolumeBatch]]:
    """Yield batches of volumes with the conditions of their files; a pass is over `num_volumes` volumes."""

    def paired(batch: Batch) -> VolumeBatch:
        condition = conditions.of(batch.files, [position // num_volumes for position in batch.positions])
        return VolumeBatch(batch.image, batch.positions, batch.labels, batch.files, condition)

    for batches in steps:
        yield [paired(batch) for batch in batches]
