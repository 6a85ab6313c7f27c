"""Replay the trace of a step through CUDA's caching allocator, to predict reserved memory as well as allocated.

The allocator requests segments from the driver, splits them into blocks, and returns none of them unless it has to.
Reserved memory is what `nvidia-smi` shows and what has to fit a budget.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from memory.predict.prediction import MIB
from memory.predict.records import StepEvents

ALIGNMENT = 512
SMALL_REQUEST = 1 * MIB  # up to this size: the small pool
SMALL_SEGMENT = 2 * MIB
MEDIUM_REQUEST = 10 * MIB  # below this size: a shared segment of LARGE_SEGMENT; from this size: its own segment
LARGE_SEGMENT = 20 * MIB
LARGE_ROUNDING = 2 * MIB


def round_up(nbytes: int, unit: int) -> int:
    """Return `nbytes` rounded up to a multiple of `unit`."""
    return -(-nbytes // unit) * unit


@dataclass(frozen=True)
class AllocatorLimits:
    """What `PYTORCH_CUDA_ALLOC_CONF` says; `max_split_bytes` protects large blocks from being split."""

    expandable_segments: bool = False
    max_split_bytes: float = math.inf

    @classmethod
    def parse(cls, text: str) -> AllocatorLimits:
        """Read the value of `device.allocator`."""
        options = dict(part.split(":", 1) for part in text.replace(" ", "").split(",") if ":" in part)
        split = options.get("max_split_size_mb")
        is_expandable = options.get("expandable_segments", "").lower() == "true"
        return cls(is_expandable, int(split) * MIB if split and split.isdigit() else math.inf)

    def allow(self, size: int, block_size: int) -> bool:
        """Return whether a request may take a free block: none below the limit takes one above it, none wastes much."""
        if size < self.max_split_bytes:
            return block_size < self.max_split_bytes
        return block_size < size + LARGE_SEGMENT


@dataclass(slots=True, eq=False)
class _Block:
    size: int
    number: int
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True)
class _Pool:
    """The free blocks of one pool, ordered by size for best fit, and the last block of its expandable segment."""

    is_small: bool
    free: list[tuple[int, int, _Block]] = field(default_factory=list)
    last: _Block | None = None

    def add(self, block: _Block) -> None:
        block.is_free = True
        insort(self.free, (block.size, block.number, block))

    def remove(self, block: _Block) -> None:
        block.is_free = False
        del self.free[bisect_left(self.free, (block.size, block.number))]

    def best_fit(self, size: int, limits: AllocatorLimits) -> _Block | None:
        position = bisect_left(self.free, (size,))
        found = self.free[position][2] if position < len(self.free) else None
        if found is not None and found is self.last and position + 1 < len(self.free):
            # The block at the end of an expandable segment counts as all that the segment can still become.
            found = self.free[position + 1][2]
        return found if found is not None and limits.allow(size, found.size) else None


class CachingAllocator:
    """A caching allocator that only counts: `allocated` bytes in use after rounding, `reserved` bytes of segments."""

    def __init__(self, limits: AllocatorLimits) -> None:
        self.limits, self.expandable_segments = limits, limits.expandable_segments
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._pools = {True: _Pool(is_small=True), False: _Pool(is_small=False)}
        self._numbers = count()

    def allocate(self, nbytes: int) -> _Block | None:
        """Return a block for `nbytes`; None for an empty tensor."""
        if nbytes == 0:
            return None
        size = round_up(nbytes, ALIGNMENT)
        pool = self._pools[size <= SMALL_REQUEST]
        block = pool.best_fit(size, self.limits)
        if block is not None:
            pool.remove(block)
        else:
            block = self._extend(pool, size) if self.expandable_segments else self._new_segment(size)
        self._split(pool, block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: _Block | None, nbytes: int) -> None:
        """Free a block and merge it with free neighbours."""
        if block is None:
            return
        pool = self._pools[round_up(nbytes, ALIGNMENT) <= SMALL_REQUEST]
        self.allocated -= block.size
        if block.before is not None and block.before.is_free:
            pool.remove(block.before)
            block = self._merge(pool, block.before, block)
        if block.after is not None and block.after.is_free:
            pool.remove(block.after)
            block = self._merge(pool, block, block.after)
        pool.add(block)

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _new_segment(self, size: int) -> _Block:
        if size <= SMALL_REQUEST:
            segment = SMALL_SEGMENT
        else:
            segment = LARGE_SEGMENT if size < MEDIUM_REQUEST else round_up(size, LARGE_ROUNDING)
        self._reserve(segment)
        return _Block(segment, next(self._numbers))

    def _extend(self, pool: _Pool, size: int) -> _Block:
        """Grow the pool's single segment at its end, starting with the free block there, if any."""
        end = pool.last if pool.last is not None and pool.last.is_free else None
        missing = size - (end.size if end is not None else 0)
        grown = round_up(missing, SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT)
        self._reserve(grown)
        if end is not None:
            pool.remove(end)
            end.size += grown
            return end
        block = _Block(grown, next(self._numbers), before=pool.last)
        if pool.last is not None:
            pool.last.after = block
        pool.last = block
        return block

    def _split(self, pool: _Pool, block: _Block, size: int) -> None:
        rest = block.size - size
        if pool.is_small or self.expandable_segments:
            is_worth_it = rest >= ALIGNMENT
        else:
            is_worth_it = rest > SMALL_REQUEST and size < self.limits.max_split_bytes
        if not is_worth_it:
            return
        remainder = _Block(rest, next(self._numbers), before=block, after=block.after)
        if block.after is not None:
            block.after.before = remainder
        if pool.last is block:
            pool.last = remainder
        block.after, block.size = remainder, size
        pool.add(remainder)

    def _merge(self, pool: _Pool, first: _Block, second: _Block) -> _Block:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if pool.last is second:
            pool.last = first
        return first


class PinnedAllocator:
    """Pinned host memory as torch hands it out: blocks of powers of two, kept for the next request of their size."""

    def __init__(self) -> None:
        self.reserved = 0
        self._free: Counter[int] = Counter()

    def allocate(self, nbytes: int) -> int:
        """Return the size of the block for `nbytes`."""
        size = 1 << max(0, nbytes - 1).bit_length()
        if self._free[size]:
            self._free[size] -= 1
        else:
            self.reserved += size
        return size

    def release(self, size: int) -> None:
        """Keep a block for later."""
        self._free[size] += 1


def replay(trace: Iterable[int], sizes: Sequence[int], limits: AllocatorLimits) -> CachingAllocator:
    """Run a trace through the allocator and return the allocator.

    trace: an allocation is its index into `sizes`, a release the complement of that index; sizes of 0 are skipped.
    """
    allocator = CachingAllocator(limits)
    blocks: dict[int, _Block | None] = {}
    for event in trace:
        if event >= 0:
            blocks[event] = allocator.allocate(sizes[event])
        else:
            allocator.release(blocks.pop(~event), sizes[~event])
    return allocator


def training_trace(
    trace: Sequence[int], categories: Sequence[str], step: StepEvents, incoming: set[int], kept: set[int]
) -> tuple[list[int], list[int]]:
    """Return the trace of two updates, made of one step that began with optimizer states, and what it allocates.

    Where blocks lie decides how well later ones fit. In a real run libraries take their memory, and the first
    micro-batch its gradients, between activations, and optimizer states come after the first backward pass.

    incoming: gradients as backward hands them to parameters. kept: what libraries take once. The second list says of
    which allocation each is a copy.
    """
    copies = _Copies(kept)
    before = [event for event in trace[: step.start] if event >= 0]
    released = {~event for event in trace[: step.start] if event < 0}
    backward, update = trace[step.start : step.update], trace[step.update : step.end]
    is_accumulating = any(categories[index] == "gradients" and index not in released for index in before)
    for index in before:
        if index not in released and categories[index] not in ("optimizer", "gradients"):
            copies.allocate(index)
    for number in range(2):
        if is_accumulating:
            copies.run(backward, incoming)
            copies.forget(incoming)
        copies.run(backward, set())
        for index in before if not number else ():
            if categories[index] == "optimizer":
                copies.allocate(index)
        copies.run(update, set())
        copies.end_update()
    return copies.trace, copies.sources


class _Copies:
    """A trace that repeats another one; each repetition allocates anew."""

    def __init__(self, kept: set[int]) -> None:
        self.kept = kept
        self.trace: list[int] = []
        self.sources: list[int] = []
        self._live: dict[int, int] = {}
        self._gradients: list[int] = []
        self._of_update: set[int] = set()

    def allocate(self, index: int) -> None:
        self._live[index] = len(self.sources)
        self.trace.append(len(self.sources))
        self.sources.append(index)

    def run(self, events: Sequence[int], kept: set[int]) -> None:
        """Repeat events; allocations in `kept` are not released."""
        for event in events:
            if event < 0:
                if ~event not in kept and ~event in self._live and ~event not in self.kept:
                    self.trace.append(~self._live.pop(~event))
                    self._of_update.discard(~event)
            elif event not in self._live or event not in self.kept:
                self.allocate(event)
                if event not in self.kept:
                    self._of_update.add(event)

    def forget(self, gradients: set[int]) -> None:
        """End a micro-batch: the gradients stay until the update is over, everything else of it is released."""
        for index in list(self._of_update):
            copy = self._live.pop(index)
            if index in gradients:
                self._gradients.append(copy)
            else:
                self.trace.append(~copy)
        self._of_update.clear()

    def end_update(self) -> None:
        """Release the gradients and whatever else the update left."""
        self.forget(set())
        self.trace += [~copy for copy in self._gradients]
        self._gradients.clear()


def replay_pinned(trace: Iterable[int], sizes: Sequence[int]) -> int:
    """Run a trace through the allocator of pinned memory and return the bytes that it takes from the host."""
    allocator = PinnedAllocator()
    blocks: dict[int, int] = {}
    for event in trace:
        if event >= 0 and sizes[event]:
            blocks[event] = allocator.allocate(sizes[event])
        elif event < 0 and ~event in blocks:
            allocator.release(blocks.pop(~event))
    return allocator.reserved
