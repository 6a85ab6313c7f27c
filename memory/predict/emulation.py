"""Run any piece of code under the tracker, on fake or real tensors, with CUDA's autocast rules or the CPU's."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memory.predict.cuda_autocast import cuda_autocast_rules
from memory.predict.records import combined
from memory.predict.tracker import MemoryTracker
from runtime.observer import Chunk, MemoryObserver, observed_by


@contextmanager
def emulated(fake: bool = True, cuda: bool = True) -> Iterator[FakeTensorMode | None]:
    """Emulate a GPU on the CPU inside the block, where networks must be built; yield the mode for `tracked`.

    fake: tensors hold no data, so size costs nothing. cuda: CPU tensors get the dtypes and copies they would get on a
    GPU.
    """
    with ExitStack() as stack:
        mode = None
        if fake:
            mode = stack.enter_context(FakeTensorMode())
            mode.cache_enabled = False  # `KnownResults` remembers the same results at a fraction of the cost
        if cuda:
            stack.enter_context(cuda_autocast_rules())
        yield mode


@contextmanager
def tracked(mode: FakeTensorMode | None, cuda: bool = True, without_triton: int = 0) -> Iterator[MemoryTracker]:
    """Yield a tracker that records everything in the block and counts offloaded tensors as host memory."""
    with MemoryTracker(cuda, mode, without_triton=without_triton) as tracker, observed_by(_StepObserver(tracker)):
        yield tracker


class _StepObserver(MemoryObserver):
    """Tells a tracker what a step offloads, and runs only as many equal chunks of a loss as it needs to see."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self.tracker = tracker

    def host_allocation(self) -> AbstractContextManager[None]:
        return self.tracker.on_host()

    def emulates_gpu(self) -> bool:
        return self.tracker.cuda

    def free_host_bytes(self) -> int:
        return sys.maxsize  # what this machine has says nothing about the one that is predicted

    def chunks_to_run(self, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        """Yield the first two of equal chunks and let the tracker repeat the second.

        The second is the first to start from the state that an equal chunk leaves behind.
        """
        if self.tracker.fake is None:
            yield from chunks
            return
        for _, group in groupby(chunks, key=_shape_of):
            first, *others = group
            yield first
            if others:
                segment = _Segment(self.tracker)
                yield others[0]
                is_repeated = segment.repeat(len(others) - 1)
                yield from () if is_repeated else others[1:]


class CopiedWeights(MemoryObserver):
    """Collects the weights that networks copy into another layout where they moved.

    A GPU has held such weights in both layouts, which leaves holes.
    """

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def weights_copied(self, weights: Sequence[Tensor]) -> None:
        """Add weights."""
        self.weights.extend(weights)


def place(tracker: MemoryTracker, weights: Iterable[Tensor], copied: Sequence[Tensor]) -> None:
    """Let the tracker see weights arrive on a device: all of them, and then the copies of those that are laid out."""
    is_copied = {id(weight) for weight in copied}
    originals: list[tuple[Tensor, Tensor]] = []
    for weight in weights:
        if id(weight) in is_copied:
            originals.append((weight, torch.empty_like(weight)))
        tracker.adopt([originals[-1][1] if id(weight) in is_copied else weight], "parameters")
    while originals:
        weight, _ = originals.pop(0)
        tracker.adopt([weight], "parameters")


def _shape_of(chunk: Sequence[Any]) -> tuple[int, tuple[bool, ...]]:
    return len(chunk), tuple(isinstance(part, int) for part in chunk[0])


class _Segment:
    """What a tracker records from now on, until it is repeated."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self.tracker = tracker
        self.start, self.first = len(tracker.trace), len(tracker.allocations)
        self.once = len(tracker.kept), len(tracker.benchmarked)
        self.counts = tracker.flops, tracker.work
        tracker.start_counting()

    def repeat(self, copies: int) -> bool:
        """Record the segment so many times more; return False if it cannot be repeated.

        The copies come before the segment itself, because what it has left is still alive.
        """
        tracker = self.tracker
        events, records = tracker.trace[self.start :], tracker.allocations
        released = {~event for event in events if event < 0}
        left = [event for event in events if event >= 0 and event not in released]
        taken_over = sorted(index for index in released if index < self.first)
        is_even = [records[index].nbytes for index in taken_over] == [records[index].nbytes for index in left]
        if not is_even or self.once != (len(tracker.kept), len(tracker.benchmarked)):
            copies = 0
        predecessor = {index: index for index in taken_over}
        trace = tracker.trace[: self.start]
        for _ in range(copies):
            copy = dict(predecessor)
            for event in events:
                if event >= 0:
                    copy[event] = len(records)
                    records.append(records[event])
                trace.append(copy[event] if event >= 0 else ~copy[~event])
            predecessor = {old: copy[new] for old, new in zip(taken_over, left, strict=True)}
        trace += [event if event >= 0 else ~predecessor.get(~event, ~event) for event in events]
        tracker.trace[:] = trace
        flops, work = self.counts
        for purpose, number in tracker.flops.items():
            flops[purpose] += (copies + 1) * number
        tracker.flops, tracker.work = flops, combined([(1, work), (copies + 1, tracker.work)])
        return bool(copies)


def measure_peak(
    function: Callable[[MemoryTracker], Any], fake: bool = True, cuda: bool = True, without_triton: int = 0
) -> MemoryTracker:
    """Run `function(tracker)` and return the tracker; `tracker.peak["device"]` is the peak in bytes.

    `function` must build its networks itself; it may pass them to `tracker.name_modules` and `tracker.adopt`.
    """
    with emulated(fake, cuda) as mode, tracked(mode, cuda, without_triton) as tracker:
        function(tracker)
    return tracker
