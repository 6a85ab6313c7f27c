"""Batches addressed by step: step n depends on (seed, n) only, not on workers, ranks or accumulation."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from data.loading import load_file, random_part
from data.volumes import VolumeFile
from data.workers import Failure, make_loader, num_workers, one_ahead, start
from settings import ConfigError, DataError, Problem, TrainingSettings
from settings.data import DataSettings

# Each use of the seed has its own random stream.
ORDER_STREAM = 1
SAMPLE_STREAM = 2


@dataclass(frozen=True)
class Batch:
    """One micro-batch: `image` is float32 (B, C, D, H, W) in the network's range.

    `positions` index the run's sequence of samples, or the list of files in validation. `files` holds the names for
    messages.
    """

    image: Tensor
    positions: tuple[int, ...]
    labels: Tensor | None
    files: tuple[str, ...]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch with its tensors on `device`."""
        labels = None if self.labels is None else self.labels.to(device, non_blocking=non_blocking)
        return Batch(self.image.to(device, non_blocking=non_blocking), self.positions, labels, self.files)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; the DataLoader calls this."""
        labels = None if self.labels is None else self.labels.pin_memory()
        return Batch(self.image.pin_memory(), self.positions, labels, self.files)


@dataclass(frozen=True)
class BatchPlan:
    """Which samples of the run's single sequence go to each step, micro-batch and rank.

    With N volumes, sample k is volume permutation(seed, k // N)[k % N], cropped and augmented by draws from (seed, k).
    Ranks take adjacent micro-batches, so r ranks with accumulation a see the same samples as one rank with
    accumulation r * a.
    """

    seed: int
    batch_size: int
    accumulation: int
    rank: int = 0
    world_size: int = 1

    @classmethod
    def of(cls, training: TrainingSettings, seed: int, rank: int, world_size: int) -> BatchPlan:
        """Return the plan of one rank for the training section of the settings."""
        return cls(seed, training.batch_size, training.gradient_accumulation_steps, rank, world_size)

    @property
    def effective_batch(self) -> int:
        """Return the number of samples in one step, over all micro-batches and ranks."""
        return self.batch_size * self.accumulation * self.world_size

    def positions(self, step: int, micro_batch: int) -> tuple[int, ...]:
        """Return the positions of this rank's samples in one micro-batch."""
        first = step * self.effective_batch + (micro_batch * self.world_size + self.rank) * self.batch_size
        return tuple(range(first, first + self.batch_size))

    def sample_rng(self, position: int) -> np.random.Generator:
        """Return the generator for everything random about one sample."""
        return np.random.default_rng([self.seed, SAMPLE_STREAM, position])

    def names(self, files: Sequence[VolumeFile]) -> Callable[[int, int], list[str]]:
        """Return a function from (step, micro-batch) to the names of the volumes that this rank sees."""
        order = VolumeOrder(self.seed, len(files))
        return lambda step, micro_batch: [files[order(k)].name for k in self.positions(step, micro_batch)]


class VolumeOrder:
    """The order of the volumes: every pass visits each volume once, in a new random order."""

    def __init__(self, seed: int, number: int) -> None:
        assert number > 0, "an order needs at least one volume"
        self.seed = seed
        self.number = number
        self._pass = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def __call__(self, position: int) -> int:
        """Return the index of the volume at a position."""
        pass_number, place = divmod(position, self.number)
        if pass_number != self._pass:
            rng = np.random.default_rng([self.seed, ORDER_STREAM, pass_number])
            self._permutation = rng.permutation(self.number)
            self._pass = pass_number
        return int(self._permutation[place])


def training_batches(
    files: Sequence[VolumeFile], s: DataSettings, plan: BatchPlan, first_step: int, last_step: int
) -> Iterator[list[Batch]]:
    """Yield the `plan.accumulation` micro-batches of each step in [first_step, last_step).

    Workers start with this call, not with the first batch. Raises DataError, naming the file, when a file can no longer
    be read, and TrainingError when a worker dies.
    """
    assert files, "training needs at least one volume"
    samples = _Samples(files, s, plan)
    chunks = (
        plan.positions(step, micro_batch)
        for step in range(first_step, last_step)
        for micro_batch in range(plan.accumulation)
    )
    workers = num_workers(s, partial(samples.__getitem__, plan.positions(first_step, 0)[0]), plan.batch_size)
    batches = start(make_loader(samples, s, chunks, workers, _collate, plan.accumulation))
    steps = ([next(batches) for _ in range(plan.accumulation)] for _ in range(first_step, last_step))
    # Without workers the run itself reads, when it needs the samples.
    return one_ahead(steps) if workers else steps


class ValidationBatches:
    """A rank's share of the volumes as batches of one; whole volumes even if `data.patch_size` is set.

    Can be iterated any number of times. Rank r of w gets files r, r + w, ...; `positions` are indices into `files`.
    """

    def __init__(self, files: Sequence[VolumeFile], s: DataSettings, rank: int = 0, world_size: int = 1) -> None:
        self._positions = [(position,) for position in range(rank, len(files), world_size)]
        self._settings = s
        self._samples = _Samples(files, s) if self._positions else None
        self._loader: DataLoader | None = None

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[Batch]:
        if self._samples is None:
            return iter(())
        if self._loader is None or not self._settings.persistent_workers:
            workers = min(num_workers(self._settings, partial(self._samples.__getitem__, 0), 1), len(self))
            self._loader = make_loader(self._samples, self._settings, self._positions, workers, _collate)
        return start(self._loader)


class VolumeMemory:
    """Slots for `number` volumes of one shape, each filled when its volume is first loaded.

    Workers forked later share the memory: the one that loads a volume first fills its slot. If two load the same volume
    at once, both write the same bytes.
    """

    def __init__(self, number: int, shape: tuple[int, ...]) -> None:
        volume_bytes = 4 * math.prod(shape)
        available = psutil.virtual_memory().available
        if number * volume_bytes > available:
            needed, free = (f"{size / 2**30:.1f} GiB" for size in (number * volume_bytes, available))
            found = f"memory: {number} volumes need {needed} of memory, {free} is free"
            fits = f"at most {available // volume_bytes} volumes fit"
            raise ConfigError([Problem("data.prepared", found, fits, "set disk, which needs no memory, or none")])
        self._is_filled = np.frombuffer(mmap.mmap(-1, number), np.bool_)
        volumes = np.frombuffer(mmap.mmap(-1, number * volume_bytes), np.float32)
        self._volumes = torch.from_numpy(volumes.reshape(number, *shape))
        # A memory barrier: no CPU may see the flag before the volume it announces.
        self._fence = threading.Lock()

    def get(self, index: int) -> Tensor | None:
        """Return a volume, or None if it is not there yet; the tensor is a view: do not write to it."""
        with self._fence:
            is_filled = bool(self._is_filled[index])
        return self._volumes[index] if is_filled else None

    def put(self, index: int, image: Tensor) -> None:
        """Fill the slot of a volume."""
        self._volumes[index].copy_(image)
        with self._fence:
            self._is_filled[index] = True


@dataclass(frozen=True)
class _Sample:
    image: Tensor
    position: int
    file: VolumeFile


class _Samples(Dataset):
    """The samples of training, of which sample k depends on (seed, k) only; without a plan, volume k as it is."""

    def __init__(self, files: Sequence[VolumeFile], s: DataSettings, plan: BatchPlan | None = None) -> None:
        self.files = tuple(files)
        self.settings = s
        self.plan = plan
        self.order = VolumeOrder(plan.seed, len(files)) if plan is not None else int
        self.memory: VolumeMemory | None = None
        if s.prepared == "memory":
            self.memory = VolumeMemory(len(self.files), (self.files[0].num_channels, *s.voxel_size))

    def __getitem__(self, position: int) -> _Sample | Failure:
        index = self.order(position)
        try:
            image = self._read(index)
        except DataError as error:
            return Failure(str(error))
        if self.plan is not None and (self.settings.patch_size is not None or self.settings.use_augmentation):
            image = random_part(image, self.settings, self.plan.sample_rng(position))
        return _Sample(image, position, self.files[index])

    def _read(self, index: int) -> Tensor:
        """Return a volume on the network's grid; it may be a view: do not write to it."""
        kept = self.memory.get(index) if self.memory is not None else None
        if kept is not None:
            return kept
        image = load_file(self.files[index], self.settings).image
        if self.memory is not None:
            self.memory.put(index, image)
        return image


def _collate(samples: list[_Sample | Failure]) -> Batch | Failure:
    loaded: list[_Sample] = []
    for sample in samples:
        if isinstance(sample, Failure):
            return sample
        loaded.append(sample)
    labels = [sample.file.label for sample in loaded]
    return Batch(
        # Always a copy, in a worker straight into the memory that it shares with the run: training cannot modify a
        # kept volume, and a patch reads only its own pages of a file.
        image=default_collate([sample.image for sample in loaded]),
        positions=tuple(sample.position for sample in loaded),
        labels=None if None in labels else torch.tensor(labels, dtype=torch.long),
        files=tuple(sample.file.name for sample in loaded),
    )
