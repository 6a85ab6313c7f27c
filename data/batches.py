"""Batches addressed by step: what step n sees is a function of (seed, n), not of workers, ranks or accumulation."""

from __future__ import annotations

import atexit
import logging
import math
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.cache import VolumeCache
from data.transforms import load_volume, random_part
from data.volumes import VolumeFile
from settings import DataError, TrainingError, TrainingSettings
from settings.data import DataSettings

log = logging.getLogger(__name__)

# Different uses of one seed draw from different streams.
ORDER_STREAM = 1
SAMPLE_STREAM = 2


@dataclass(frozen=True)
class Batch:
    """One micro-batch: `image` is float32 (B, C, D, H, W) in the network's range.

    `positions` are the samples' places in the run's sequence of samples (in validation: in the list of files), `files`
    their names, for messages.
    """

    image: Tensor
    positions: tuple[int, ...]
    labels: Tensor | None
    files: tuple[str, ...]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch with its tensors on a device."""
        labels = None if self.labels is None else self.labels.to(device, non_blocking=non_blocking)
        return Batch(self.image.to(device, non_blocking=non_blocking), self.positions, labels, self.files)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; the loader calls this."""
        labels = None if self.labels is None else self.labels.pin_memory()
        return Batch(self.image.pin_memory(), self.positions, labels, self.files)


@dataclass(frozen=True)
class BatchPlan:
    """Which samples each step, micro-batch and rank takes from the run's one sequence of samples.

    Sample k is volume permutation(seed, k // N)[k % N], its crop and augmentation drawn from (seed, k). Ranks take
    neighbouring micro-batches, so r ranks with accumulation a see what one rank sees with accumulation r * a.
    """

    seed: int
    batch_size: int
    accumulation: int
    rank: int = 0
    world_size: int = 1

    @classmethod
    def of(cls, training: TrainingSettings, seed: int, rank: int, world_size: int) -> BatchPlan:
        """Return the plan of one rank from the training section of the settings."""
        return cls(seed, training.batch_size, training.gradient_accumulation_steps, rank, world_size)

    @property
    def effective_batch(self) -> int:
        """Return how many samples one step takes, over all micro-batches and ranks."""
        return self.batch_size * self.accumulation * self.world_size

    def positions(self, step: int, micro_batch: int) -> tuple[int, ...]:
        """Return the positions of this rank's samples in one micro-batch."""
        first = step * self.effective_batch + (micro_batch * self.world_size + self.rank) * self.batch_size
        return tuple(range(first, first + self.batch_size))

    def sample_rng(self, position: int) -> np.random.Generator:
        """Return the source of everything random about one sample."""
        return np.random.default_rng([self.seed, SAMPLE_STREAM, position])

    def names(self, files: Sequence[VolumeFile]) -> Callable[[int, int], list[str]]:
        """Return a function from (step, micro-batch) to the names of the volumes that this rank sees there."""
        order = VolumeOrder(self.seed, len(files))
        return lambda step, micro_batch: [files[order(k)].name for k in self.positions(step, micro_batch)]


class VolumeOrder:
    """The order in which volumes are seen: each once, shuffled, then each once again in another order."""

    def __init__(self, seed: int, number: int) -> None:
        assert number > 0, "there is nothing to order"
        self.seed = seed
        self.number = number
        self._pass = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def __call__(self, position: int) -> int:
        """Return the index of the volume at a position."""
        number_of_pass, place = divmod(position, self.number)
        if number_of_pass != self._pass:
            rng = np.random.default_rng([self.seed, ORDER_STREAM, number_of_pass])
            self._permutation = rng.permutation(self.number)
            self._pass = number_of_pass
        return int(self._permutation[place])


def training_batches(
    files: Sequence[VolumeFile], s: DataSettings, plan: BatchPlan, first_step: int, last_step: int
) -> Iterator[list[Batch]]:
    """Yield for each step in [first_step, last_step) its `plan.accumulation` micro-batches.

    Workers start with this call, not with the first batch. Raises DataError in a file's name when it can no longer be
    read, TrainingError when a worker dies.
    """
    assert files, "there are no training volumes"
    samples = _TrainingSamples(files, s, plan)
    chunks = (
        plan.positions(step, micro_batch)
        for step in range(first_step, last_step)
        for micro_batch in range(plan.accumulation)
    )
    batches = _batches(_loader(samples, s, chunks, s.num_workers))
    return _steps(batches, first_step, last_step, plan.accumulation)


def _steps(batches: Iterator[Batch], first: int, last: int, accumulation: int) -> Iterator[list[Batch]]:
    for _ in range(first, last):
        yield [next(batches) for _ in range(accumulation)]


class ValidationBatches:
    """Whole volumes one by one in a fixed order; iterate as often as needed.

    Rank r of w gets files r, r + w, ... and `positions` are places in `files`. A share of `data.cache_rate` of them
    stays in memory between iterations.
    """

    def __init__(self, files: Sequence[VolumeFile], s: DataSettings, rank: int = 0, world_size: int = 1) -> None:
        self._mine = tuple(range(rank, len(files), world_size))
        self._settings = s
        self._samples = _ValidationSamples([files[i] for i in self._mine], s, self._mine) if self._mine else None
        self._loader: DataLoader | None = None

    def __len__(self) -> int:
        return len(self._mine)

    def __iter__(self) -> Iterator[Batch]:
        if self._samples is None:
            return iter(())
        if self._loader is None or not self._settings.persistent_workers:
            chunks = [(place,) for place in range(len(self._mine))]
            workers = min(self._settings.num_workers, len(self._mine))
            self._loader = _loader(self._samples, self._settings, chunks, workers)
        return _batches(self._loader)


def validation_batches(
    files: Sequence[VolumeFile], s: DataSettings, rank: int = 0, world_size: int = 1
) -> ValidationBatches:
    """Return this rank's share of the volumes, whole, as batches of one; also with `data.patch_size`."""
    return ValidationBatches(files, s, rank, world_size)


@dataclass(frozen=True)
class _Sample:
    image: Tensor
    position: int
    file: VolumeFile


@dataclass(frozen=True)
class _Failure:
    """An error that crosses from a worker as a value: the loader would bury its text in a traceback."""

    text: str


class _CachedReader:
    """Loads volumes up to where randomness begins, through the cache."""

    def __init__(self, files: Sequence[VolumeFile], s: DataSettings, is_shared: bool) -> None:
        self.files = tuple(files)
        self.settings = s
        self.cache: VolumeCache | None = None
        number = math.ceil(s.cache_rate * len(self.files))
        if number:
            identity = [s.model_dump_json(), *(str(file.path) for file in self.files)] if is_shared else None
            self.cache = VolumeCache(number, (self.files[0].num_channels, *s.voxel_size), identity)

    def load(self, index: int) -> tuple[Tensor, np.ndarray]:
        """Return a volume on the network's grid and its spacing; the tensor may be the cache itself."""
        cached = self.cache.get(index) if self.cache is not None else None
        if cached is not None:
            return cached
        file = self.files[index]
        loaded = load_volume(file.path, self.settings, file.num_channels)
        if self.cache is not None:
            self.cache.put(index, loaded.image, loaded.geometry.spacing_mm)
        return loaded.image, loaded.geometry.spacing_mm


class _TrainingSamples(Dataset):
    """Sample k of the run, a function of (seed, k)."""

    def __init__(self, files: Sequence[VolumeFile], s: DataSettings, plan: BatchPlan) -> None:
        self.volumes = _CachedReader(files, s, is_shared=True)
        self.plan = plan
        self.order = VolumeOrder(plan.seed, len(files))

    def __getitem__(self, position: int) -> _Sample | _Failure:
        index = self.order(position)
        try:
            image, spacing_mm = self.volumes.load(index)
        except DataError as error:
            return _Failure(str(error))
        s = self.volumes.settings
        if s.patch_size is not None or s.use_augmentation:
            image = random_part(image, spacing_mm, s, self.plan.sample_rng(position))
        return _Sample(image, position, self.volumes.files[index])


class _ValidationSamples(Dataset):
    """The volumes as they are, each with its position in the whole list."""

    def __init__(self, files: Sequence[VolumeFile], s: DataSettings, positions: Sequence[int]) -> None:
        # Ranks validate different volumes: their caches have nothing to share.
        self.volumes = _CachedReader(files, s, is_shared=False)
        self.positions = positions

    def __getitem__(self, place: int) -> _Sample | _Failure:
        try:
            image, _ = self.volumes.load(place)
        except DataError as error:
            return _Failure(str(error))
        return _Sample(image, self.positions[place], self.volumes.files[place])


def _collate(samples: list[_Sample | _Failure]) -> Batch | _Failure:
    whole = [sample for sample in samples if isinstance(sample, _Sample)]
    if len(whole) < len(samples):
        return next(sample for sample in samples if isinstance(sample, _Failure))
    labels = [sample.file.label for sample in whole]
    return Batch(
        # Always a copy: what training does to a batch never reaches the cache.
        image=torch.stack([sample.image for sample in whole]),
        positions=tuple(sample.position for sample in whole),
        labels=None if None in labels else torch.tensor(labels, dtype=torch.long),
        files=tuple(sample.file.name for sample in whole),
    )


def _loader(samples: Dataset, s: DataSettings, chunks: Any, num_workers: int) -> DataLoader:
    has_workers = num_workers > 0
    return DataLoader(
        samples,
        batch_sampler=chunks,
        collate_fn=_collate,
        num_workers=num_workers,
        prefetch_factor=s.prefetch_factor if has_workers else None,
        pin_memory=s.pin_memory and torch.cuda.is_available(),
        persistent_workers=s.persistent_workers and has_workers,
        worker_init_fn=_start_worker if has_workers else None,
        # Forked workers share the cache's memory.
        multiprocessing_context="fork" if has_workers else None,
    )


_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


@atexit.register
def _end_workers() -> None:
    # At exit Python asks each child to end with the signal that `_start_worker` ignores, and waits for it.
    for worker in _workers:
        if worker.is_alive():
            worker.kill()


def _start_worker(_: int) -> None:
    # Signals go to the whole process group; the training process decides when its workers stop.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _batches(loader: DataLoader) -> Iterator[Batch]:
    """Start the loader's workers and return its batches, errors put in words."""
    previous = signal.getsignal(signal.SIGCHLD)
    batches = iter(loader)
    _workers.update(getattr(batches, "_workers", ()))
    # torch's own handler would raise a dead worker's error anywhere in the training step; `_checked` finds it too.
    if previous is not None and signal.getsignal(signal.SIGCHLD) is not previous:
        signal.signal(signal.SIGCHLD, previous)
    return _checked(batches)


def _checked(batches: Iterator[Batch | _Failure]) -> Iterator[Batch]:
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            raise _worker_error(error, getattr(batches, "_workers", ())) from error
        if isinstance(batch, _Failure):
            # The error's traceback would otherwise keep the workers alive for as long as somebody holds it.
            del batches
            raise DataError(batch.text)
        yield batch


def _worker_error(error: Exception, workers: Sequence[BaseProcess]) -> Exception:
    """Put a worker's death in words; other errors stay what they are."""
    if isinstance(error, OSError | EOFError):
        # The worker died while it handed a batch over: the system may need a moment to notice.
        for worker in workers:
            worker.join(timeout=1)
    dead = [worker for worker in workers if worker.exitcode]
    if not dead and "DataLoader worker" not in str(error):
        return error
    fates = ", ".join(f"process {worker.pid} {_fate(worker.exitcode or 0)}" for worker in dead) or str(error)
    return TrainingError(
        f"data.num_workers: a worker of the loader died ({fates}); most often the memory ran out; "
        "lower data.num_workers, data.prefetch_factor or data.cache_rate, or in a container raise its --shm-size"
    )


def _fate(exit_code: int) -> str:
    return f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with code {exit_code}"
