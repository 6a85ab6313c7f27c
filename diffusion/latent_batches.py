"""Batches of latents, addressed by step like the batches of volumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.batches import Batch, BatchPlan, VolumeOrder, one_ahead
from diffusion.conditioning import NOTHING, ConditionBatch, ConditionStore


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


def latent_batches(
    read: Callable[[int, int], Tensor],
    num_volumes: int,
    plan: BatchPlan,
    first_step: int,
    last_step: int,
    pin_memory: bool = False,
    conditions: ConditionStore | None = None,
    copy_at: Callable[[int], int] = lambda position: 0,
) -> Iterator[list[LatentBatch]]:
    """Yield the micro-batches of each step in [first_step, last_step).

    `read` returns the latent of a volume by its index and the number of its copy, which `copy_at` tells for a position
    of the run's sequence of samples.

    Volumes and order are those of `training_batches`. A thread reads the next step's latents during the current step
    and, with `pin_memory`, puts them into page-locked memory, from which a GPU copies without making the host wait.
    """
    assert num_volumes, "training needs at least one volume"
    order = VolumeOrder(plan.seed, num_volumes)

    def training_batch(chunk: Sequence[int]) -> LatentBatch:
        passes = [position // num_volumes for position in chunk]
        indices = [order(position) for position in chunk]
        copies = [copy_at(position) for position in chunk]
        latents = [read(index, copy) for index, copy in zip(indices, copies, strict=True)]
        condition = NOTHING if conditions is None else conditions.batch(indices, passes, copies)
        return LatentBatch(torch.stack(latents), tuple(chunk), condition)

    def load(step: int) -> list[LatentBatch]:
        chunks = [plan.positions(step, micro_batch) for micro_batch in range(plan.accumulation)]
        batches = [training_batch(chunk) for chunk in chunks]
        return [batch.pin_memory() for batch in batches] if pin_memory else batches

    yield from one_ahead(map(load, range(first_step, last_step)))


def with_conditions(
    steps: Iterator[list[Batch]], conditions: ConditionStore, seed: int, num_volumes: int
) -> Iterator[list[VolumeBatch]]:
    """Yield batches of volumes, those of `training_batches`, with their conditions."""
    order = VolumeOrder(seed, num_volumes)

    def paired(batch: Batch) -> VolumeBatch:
        passes = [position // num_volumes for position in batch.positions]
        condition = conditions.batch([order(position) for position in batch.positions], passes)
        return VolumeBatch(batch.image, batch.positions, batch.labels, batch.files, condition)

    for batches in steps:
        yield [paired(batch) for batch in batches]
