"""Runs torch's DataLoader: how its workers start and stop, and how their errors reach the user."""

from __future__ import annotations

import atexit
import logging
import math
import os
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from settings import DataError, TrainingError
from settings.data import DataSettings

log = logging.getLogger(__name__)

Item = TypeVar("Item")

# A step on a GPU takes 50 ms and more, so this many micro-batches a second keep it from waiting.
BATCHES_PER_SECOND = 20
MOST_WORKERS = 8

_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


@dataclass(frozen=True)
class Failure:
    """A DataError that a worker returns as a value, because the loader would bury its text in a traceback."""

    text: str


def num_workers(s: DataSettings, read_sample: Callable[[], Any], batch_size: int) -> int:
    """Return the number of workers: the one that is set, or for auto enough to finish `BATCHES_PER_SECOND`.

    The second of two samples is timed, because the first may open files and fill caches. Training on the CPU gets one
    worker, because more would compete with it.
    """
    if s.num_workers != "auto":
        return s.num_workers
    if not torch.cuda.is_available():
        return 1
    read_sample()
    began = time.perf_counter()
    read_sample()
    needed = math.ceil(BATCHES_PER_SECOND * batch_size * (time.perf_counter() - began))
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    workers = max(1, min(needed, cores - 1, MOST_WORKERS))
    log.info("data: %d %s for loading (data.num_workers: auto)", workers, "worker" if workers == 1 else "workers")
    return workers


def make_loader(
    dataset: Dataset, s: DataSettings, chunks: Iterable[Any], num_workers: int, collate: Any, per_update: int = 1
) -> DataLoader:
    """Return a loader that collates one batch from each chunk of sample indices, of which an update uses several."""
    has_workers = num_workers > 0
    # While one update is computed, the workers load all of the next.
    ahead = math.ceil(per_update / max(num_workers, 1)) + 1
    return DataLoader(
        dataset,
        batch_sampler=chunks,
        collate_fn=collate,
        num_workers=num_workers,
        prefetch_factor=ahead if has_workers else None,
        # auto pins as well: without a GPU there is nothing to copy to.
        pin_memory=bool(s.pin_memory) and torch.cuda.is_available(),
        persistent_workers=s.persistent_workers and has_workers,
        worker_init_fn=_start_worker if has_workers else None,
        # Forked workers share the memory of `prepared: memory`.
        multiprocessing_context="fork" if has_workers else None,
    )


def start(loader: DataLoader) -> Iterator[Any]:
    """Start the loader's workers and return its batches.

    The iterator raises DataError for a `Failure` and TrainingError when a worker dies.
    """
    previous = signal.getsignal(signal.SIGCHLD)
    batches = iter(loader)
    _workers.update(getattr(batches, "_workers", ()))
    # torch's SIGCHLD handler would raise anywhere in the training step; `_checked` notices a dead worker as well.
    if previous is not None and signal.getsignal(signal.SIGCHLD) is not previous:
        signal.signal(signal.SIGCHLD, previous)
    return _checked(batches)


def one_ahead(items: Iterator[Item]) -> Generator[Item]:
    """Yield the items; a thread gets the next one while the caller works on the current one.

    The thread also lets go of the item before the current one, which the caller no longer holds: returning the memory
    of an update of 8 volumes to the system takes about 20 ms.
    """
    used: deque[Item] = deque()

    def let_go() -> None:
        used.popleft()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="data") as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            if len(used) > 1:
                thread.submit(let_go)
            coming = thread.submit(next, items, None)
            used.append(item)
            del item
            yield used[-1]


def _start_worker(_: int) -> None:
    # A signal reaches the whole process group, but the training process decides when its workers stop.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def _kill_workers() -> None:
    # At exit Python sends each child SIGTERM, which `_start_worker` ignores, and then waits for it.
    for worker in _workers:
        if worker.is_alive():
            worker.kill()


def _checked(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            raise _worker_error(error, getattr(batches, "_workers", ())) from error
        if isinstance(batch, Failure):
            # The traceback holds this frame, which would keep the workers alive for as long as the error is kept.
            del batches
            raise DataError(batch.text)
        yield batch


def _worker_error(error: Exception, workers: Sequence[BaseProcess]) -> Exception:
    """Return a TrainingError if a worker died; return any other error unchanged."""
    if isinstance(error, OSError | EOFError):
        # The worker died while it handed over a batch; its exit code may take a moment to appear.
        for worker in workers:
            worker.join(timeout=1)
    dead = [worker for worker in workers if worker.exitcode]
    if not dead and "DataLoader worker" not in str(error):
        return error
    codes = {worker.pid: worker.exitcode or 0 for worker in dead}
    ends = [
        f"process {pid} " + (f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}")
        for pid, code in codes.items()
    ]
    return TrainingError(
        f"data.num_workers: a DataLoader worker died ({', '.join(ends) or error}), most likely because memory ran out; "
        "lower data.num_workers, set data.prepared: disk, or raise --shm-size in a container"
    )
