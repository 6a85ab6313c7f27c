"""Batches addressed by step: step n depends on (seed, n) only, not on workers, ranks or accumulation."""

from __future__ import annotations

import atexit
import math
import os
import signal
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from data.discovery import VolumeFile
from data.loading import load_file, random_part
from runtime.cli import ProgressBar
from runtime.host_memory import available_host_bytes
from settings import ConfigError, DataError, Problem, TrainingError, TrainingSettings
from settings.data import DataSettings

Item = TypeVar("Item")

# Each use of the seed has its own random stream.
ORDER_STREAM = 1
SAMPLE_STREAM = 2

# Of num_workers: auto, by where the volumes are kept.
MOST_WORKERS = {"disk": 2, "memory": 2, "none": 8}
DYING_SECONDS = 2

_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


@dataclass(frozen=True)
class Batch:
    """One micro-batch: `image` is float32 (B, C, D, H, W) in the network's range.

    `positions` index the run's sequence of samples, or the list of files in validation. `files` holds the names for
    messages.
    """

    image: Tensor
    positions: tuple[int, ...]
    files: tuple[str, ...]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch with its image on `device`."""
        return replace(self, image=self.image.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; the DataLoader calls this."""
        return replace(self, image=self.image.pin_memory())


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


@dataclass(frozen=True)
class VolumeOrder:
    """The order of the volumes: every pass visits each volume once, in a new random order."""

    seed: int
    number: int

    def __call__(self, position: int) -> int:
        """Return the index of the volume at a position."""
        pass_number, place = divmod(position, self.number)
        return int(_permutation(self.seed, self.number, pass_number)[place])


@lru_cache(maxsize=8)
def _permutation(seed: int, number: int, pass_number: int) -> np.ndarray:
    rng = np.random.default_rng([seed, ORDER_STREAM, pass_number])
    return rng.permutation(number)


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
    workers = _num_workers(s)
    batches = _start(_loader(samples, s, chunks, workers, plan.accumulation))
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
            workers = min(_num_workers(self._settings), len(self))
            self._loader = _loader(self._samples, self._settings, self._positions, workers)
        return _start(self._loader)


def one_ahead(items: Iterator[Item]) -> Generator[Item]:
    """Yield the items; a thread gets the next one while the caller works on the current one."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="data") as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


@dataclass(frozen=True)
class _Failure:
    """A DataError that a worker returns as a value, because the loader would bury its text in a traceback."""

    text: str


class _Samples(Dataset):
    """The samples of training, of which sample k depends on (seed, k) only; without a plan, volume k as it is."""

    def __init__(self, files: Sequence[VolumeFile], s: DataSettings, plan: BatchPlan | None = None) -> None:
        self.files = tuple(files)
        self.settings = s
        self.plan = plan
        self.order = VolumeOrder(plan.seed, len(files)) if plan is not None else int
        # Workers forked later share the memory.
        self.kept = _in_memory(self.files, s) if s.prepared == "memory" else None

    def __getitems__(self, positions: Sequence[int]) -> Batch | _Failure:
        """Return a batch."""
        files = [self.files[self.order(position)] for position in positions]
        try:
            images = [self._image(position) for position in positions]
        except DataError as error:
            return _Failure(str(error))
        # Always a copy, in a worker straight into the memory that it shares with the run: training cannot modify a kept
        # volume, and a patch reads only its own pages of a file.
        return Batch(default_collate(images), tuple(positions), tuple(file.name for file in files))

    def _image(self, position: int) -> Tensor:
        index = self.order(position)
        image = load_file(self.files[index], self.settings).image if self.kept is None else self.kept[index]
        if self.plan is not None and (self.settings.patch_size is not None or self.settings.use_augmentation):
            return random_part(image, self.settings, self.plan.sample_rng(position))
        return image


def _in_memory(files: Sequence[VolumeFile], s: DataSettings) -> list[Tensor]:
    """Read all volumes in parallel; raise ConfigError if they do not fit in the memory that is free."""
    volume_bytes, available = 4 * files[0].num_channels * math.prod(s.voxel_size), available_host_bytes()
    if len(files) * volume_bytes > available:
        needed, free = (f"{size / 2**30:.1f} GiB" for size in (len(files) * volume_bytes, available))
        found = f"memory: {len(files)} volumes need {needed} of memory, {free} is free"
        fits = f"at most {available // volume_bytes} volumes fit"
        raise ConfigError([Problem("data.prepared", found, fits, "set disk, which needs no memory, or none")])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        read = threads.map(lambda file: load_file(file, s).image, files)
        return [*ProgressBar(read, total=len(files), desc="reading volumes", unit="volume", leave=False)]


def _num_workers(s: DataSettings) -> int:
    """Return the number of workers: the one that is set, or for auto enough that a GPU need not wait.

    A prepared volume takes milliseconds to read, and training on the CPU would compete with its workers.
    """
    if s.num_workers != "auto":
        return s.num_workers
    if not torch.cuda.is_available():
        return 1
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_WORKERS[s.prepared], cores - 1))


def _loader(
    samples: _Samples, s: DataSettings, chunks: Iterable[Sequence[int]], num_workers: int, per_update: int = 1
) -> DataLoader:
    """Return a loader that makes one batch of each chunk of positions, of which an update uses several."""
    has_workers = num_workers > 0
    # While one update is computed, the workers load all of the next.
    ahead = math.ceil(per_update / max(num_workers, 1)) + 1
    return DataLoader(
        samples,
        batch_sampler=chunks,  # type: ignore[arg-type]
        collate_fn=lambda batch: batch,
        num_workers=num_workers,
        prefetch_factor=ahead if has_workers else None,
        # auto pins as well: without a GPU there is nothing to copy to.
        pin_memory=bool(s.pin_memory) and torch.cuda.is_available(),
        persistent_workers=s.persistent_workers and has_workers,
        worker_init_fn=_ignore_signals if has_workers else None,
        # Forked workers share the memory of `prepared: memory`.
        multiprocessing_context="fork" if has_workers else None,
    )


def _ignore_signals(_: int) -> None:
    # A signal reaches the whole process group, but the training process decides when its workers stop.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def _kill_workers() -> None:
    # At exit Python sends each child SIGTERM, which workers ignore, and then waits for it.
    for worker in _workers:
        if worker.is_alive():
            worker.kill()


def _start(loader: DataLoader) -> Iterator[Any]:
    """Start the loader's workers and return its batches."""
    previous = signal.getsignal(signal.SIGCHLD)
    batches = iter(loader)
    _workers.update(getattr(batches, "_workers", ()))
    # torch's SIGCHLD handler would raise anywhere in the training step; `_checked` notices a dead worker as well.
    if previous is not None and signal.getsignal(signal.SIGCHLD) is not previous:
        signal.signal(signal.SIGCHLD, previous)
    return _checked(batches, getattr(batches, "_workers", ()))


def _checked(batches: Iterator[Any], workers: Sequence[BaseProcess]) -> Iterator[Any]:
    """Yield the batches; raise DataError for a `_Failure`, and TrainingError when a worker dies."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            # A worker that dies while it hands over a batch leaves an OSError or an EOFError, and is gone soon after.
            if not workers or not wait([worker.sentinel for worker in workers], timeout=DYING_SECONDS):
                raise
            raise TrainingError(
                f"data.num_workers: a DataLoader worker died ({error}), most likely because memory ran out; lower "
                "data.num_workers, set data.prepared: disk, or raise --shm-size in a container"
            ) from error
        if isinstance(batch, _Failure):
            # The traceback holds this frame, which would keep the workers alive for as long as the error is kept.
            del batches
            raise DataError(batch.text)
        yield batch
