"""Replay the trace of a step through CUDA's caching allocator, to predict reserved memory as well as allocated.

The allocator requests segments from the driver, splits them into blocks, and returns none of them unless it has to.
Reserved memory is what `nvidia-smi` shows and what has to fit a budget. Where blocks lie decides how well later ones
fit, so it depends on what a run did before: what is replayed are two updates of a run, made of one tracked step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from memory.predict.prediction import MIB
from memory.predict.tracker import MemoryTracker

ALIGNMENT = 512
SMALL_REQUEST = 1 * MIB  # up to this size: the small pool
SMALL_SEGMENT = 2 * MIB
MEDIUM_REQUEST = 10 * MIB  # below this size: a shared segment of LARGE_SEGMENT; from this size: its own segment
LARGE_SEGMENT = 20 * MIB
LARGE_ROUNDING = 2 * MIB
_ENDLESS = 1 << 62


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
    """A piece of a segment, which has a number; `address` counts from its start; `is_mapped`: memory is behind it."""

    size: int
    segment: int = 0
    address: int = 0
    before: _Block | None = None
    after: _Block | None = None
    is_free: bool = False
    is_mapped: bool = True

    def cut(self, size: int) -> _Block:
        """Shorten the block to `size` and return the rest as a block of its own."""
        rest = _Block(self.size - size, self.segment, self.address + size, self, self.after)
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def take_next(self) -> None:
        """Merge the block with the one after it."""
        assert self.after is not None, "only neighbours are merged"
        self.size += self.after.size
        self.after = self.after.after
        if self.after is not None:
            self.after.before = self


class _Pool:
    """The free blocks of one pool, ordered by size for best fit, and the holes of its expandable segment by address.

    Among blocks of one size the oldest segment comes first, and in it the lowest address. The last hole is endless: the
    segment can grow.
    """

    def __init__(self, is_small: bool, is_expandable: bool) -> None:
        self.is_small = is_small
        self.page = SMALL_SEGMENT if is_small else LARGE_SEGMENT  # in which an expandable segment grows and shrinks
        self.free: list[tuple[int, int, int, _Block]] = []
        self.holes = [_Block(_ENDLESS, is_mapped=False)] if is_expandable else []

    def add(self, block: _Block) -> None:
        block.is_free = True
        insort(self.free, (block.size, block.segment, block.address, block))

    def remove(self, block: _Block) -> None:
        block.is_free = False
        del self.free[bisect_left(self.free, (block.size, block.segment, block.address))]

    def best_fit(self, size: int, limits: AllocatorLimits) -> _Block | None:
        position = bisect_left(self.free, (size,))
        if position == len(self.free):
            return None
        found = self.free[position][-1]
        for *_, larger in self.free[position + 1 :] if self.holes else ():
            if _possible_size(larger) >= _possible_size(found):
                break
            found = larger
        return found if limits.allow(size, found.size) else None


def _possible_size(block: _Block) -> int:
    """Return what a block counts as: all that it can become by mapping what follows it."""
    return block.size + (block.after.size if block.after is not None and not block.after.is_mapped else 0)


class CachingAllocator:
    """A caching allocator that only counts: `allocated` bytes in use after rounding, `reserved` bytes of segments."""

    def __init__(self, limits: AllocatorLimits) -> None:
        self.limits = limits
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._pools = {is_small: _Pool(is_small, limits.expandable_segments) for is_small in (True, False)}
        self._segments = count(1)

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
            block = self._extend(pool, size) if pool.holes else self._new_segment(size)
        rest = block.size - size
        if pool.is_small or pool.holes:
            is_split = rest >= ALIGNMENT
        else:
            is_split = rest > SMALL_REQUEST and size < self.limits.max_split_bytes
        if is_split:
            pool.add(block.cut(size))
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
            block = block.before
            pool.remove(block)
            block.take_next()
        if block.after is not None and block.after.is_free:
            pool.remove(block.after)
            block.take_next()
        pool.add(block)

    def empty_cache(self) -> None:
        """Give memory that is not in use back to the driver: whole segments, or the pages of expandable ones."""
        for pool in self._pools.values():
            for *_, block in list(pool.free):
                if pool.holes:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _unmap(self, pool: _Pool, block: _Block) -> None:
        """Turn the whole pages of a free block into a hole, which merges with those beside it."""
        start = round_up(block.address, pool.page)
        end = (block.address + block.size) // pool.page * pool.page
        if end <= start:
            return
        pool.remove(block)
        hole = block
        if start > block.address:
            hole = block.cut(start - block.address)
            pool.add(block)
        if end < hole.address + hole.size:
            pool.add(hole.cut(end - hole.address))
        hole.is_mapped = False
        self.reserved -= hole.size
        if hole.after is not None and not hole.after.is_mapped:
            pool.holes.remove(hole.after)
            hole.take_next()
        if hole.before is not None and not hole.before.is_mapped:
            hole.before.take_next()
        else:
            insort(pool.holes, hole, key=lambda other: other.address)

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _new_segment(self, size: int) -> _Block:
        if size <= SMALL_REQUEST:
            segment = SMALL_SEGMENT
        else:
            segment = LARGE_SEGMENT if size < MEDIUM_REQUEST else round_up(size, LARGE_ROUNDING)
        self._reserve(segment)
        return _Block(segment, next(self._segments))

    def _extend(self, pool: _Pool, size: int) -> _Block:
        """Map memory at the first address with enough room: in a hole and what is free around it."""
        for hole in pool.holes:
            first = hole.before if hole.before is not None and hole.before.is_free else hole
            room, block = first.size, first.after
            while room < size and block is not None and (block.is_free or not block.is_mapped):
                room, block = room + block.size, block.after
            if room >= size:
                return self._grown(pool, first, size)
        raise AssertionError("the last hole is endless")

    def _grown(self, pool: _Pool, block: _Block, size: int) -> _Block:
        """Map what follows a free block, or what a hole is, until there is one block of at least `size`."""
        if block.is_mapped:
            pool.remove(block)
        else:
            self._map(pool, block, size)
        while True:
            assert block.after is not None, "the last hole is endless"
            if block.after.is_free:
                pool.remove(block.after)
                block.take_next()
            elif block.size < size:
                self._map(pool, block.after, size - block.size)
                block.take_next()
            else:
                return block

    def _map(self, pool: _Pool, hole: _Block, nbytes: int) -> None:
        """Put memory behind the first pages of a hole."""
        grown = min(round_up(nbytes, pool.page), hole.size)
        position = pool.holes.index(hole)
        if grown < hole.size:
            pool.holes[position] = hole.cut(grown)
            pool.holes[position].is_mapped = False
        else:
            del pool.holes[position]
        hole.is_mapped = True
        self._reserve(grown)


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


def replay_pinned(trace: Iterable[int], sizes: Sequence[int]) -> int:
    """Return the bytes of pinned memory that a trace takes from the host, where sizes of 0 are skipped.

    torch hands it out in blocks of powers of two, which it keeps for the next request of their size.
    """
    reserved = 0
    free: Counter[int] = Counter()
    for event in trace:
        nbytes = sizes[max(event, ~event)]
        block = 1 << (nbytes - 1).bit_length() if nbytes else 0
        if event < 0:
            free[block] += 1
        elif free[block]:
            free[block] -= 1
        else:
            reserved += block
    return reserved


def replay_training(tracker: MemoryTracker, limits: AllocatorLimits) -> CachingAllocator:
    """Run two updates through the allocator, made of one tracked step, which began with optimizer states.

    In a real run libraries take their memory, and the first micro-batch its gradients, between activations, and
    optimizer states come after the first backward pass. Updaters take turns: the states of each come when the gradients
    of the one before are gone. In the first micro-batch cuDNN tries its algorithms, which empties the cache.
    """
    assert tracker.step is not None, "only a tracker of a whole step knows where it is in the trace"
    step, records = tracker.step, tracker.allocations
    set_up, backward = tracker.trace[: step.start], tracker.trace[step.start : step.update]
    update = tracker.trace[step.update : step.end]
    released = {~event for event in set_up if event < 0}
    states = [event for event in set_up if event >= 0 and records[event].category == "optimizer"]
    run = _RepeatedStep(tracker, limits)
    for event in set_up:
        index = max(event, ~event)
        category = records[index].category
        if category == "parameters" or (index not in released and category not in ("optimizer", "gradients")):
            run.allocate(index) if event >= 0 else run.release(index)
    is_accumulating = any(records[e].category == "gradients" and e not in released for e in set_up if e >= 0)
    gradients = set(tracker.first_gradients.values())  # as backward hands them to parameters
    owned, start = [], 0
    for end, parameters in tracker.updaters:  # what each updater owns: its states and its gradients
        of_updater = {index for parameter, index in tracker.first_gradients.items() if parameter in parameters}
        owned.append({*range(start, end), *of_updater})
        start = end
    trials = {event - step.start for event in tracker.benchmarked}
    for is_first in (True, False):
        emptying = trials if is_first else set()
        if is_accumulating:
            run.events(backward, staying=gradients, emptying=emptying)
            run.end_micro_batch(staying=gradients)
            emptying = set()
        run.events(backward, emptying=emptying)
        done = 0
        for of_updater in owned:
            for index in states if is_first else ():
                if index in of_updater:
                    run.allocate(index)
            end = max((i + 1 for i, event in enumerate(update) if event < 0 and ~event in of_updater), default=done)
            run.events(update[done:end])
            run.release_gradients(of_updater)
            done = end
        run.events(update[done:])
        run.end_micro_batch()
        run.release_gradients(gradients)
    return run.allocator


class _RepeatedStep:
    """Repeats a tracked step in an allocator; each repetition allocates anew what libraries do not keep."""

    def __init__(self, tracker: MemoryTracker, limits: AllocatorLimits) -> None:
        self.allocator, self.kept = CachingAllocator(limits), tracker.kept
        self._sizes = [0 if record.place == "host" else record.nbytes for record in tracker.allocations]
        self._live: dict[int, _Block | None] = {}
        self._of_micro_batch: set[int] = set()
        self._gradients: list[tuple[int, _Block | None]] = []  # of earlier micro-batches

    def allocate(self, index: int) -> None:
        self._live[index] = self.allocator.allocate(self._sizes[index])

    def release(self, index: int) -> None:
        self.allocator.release(self._live.pop(index), self._sizes[index])

    def events(self, events: Sequence[int], staying: Container[int] = (), emptying: Container[int] = ()) -> None:
        """Repeat events; do not release allocations in `staying`, and empty the cache before events in `emptying`."""
        for position, event in enumerate(events):
            if position in emptying:
                self.allocator.empty_cache()
            if event in self.kept:
                if event not in self._live:
                    self.allocate(event)
            elif event >= 0:
                self.allocate(event)
                self._of_micro_batch.add(event)
            elif ~event in self._live and ~event not in staying:
                self.release(~event)
                self._of_micro_batch.discard(~event)

    def end_micro_batch(self, staying: Container[int] = ()) -> None:
        """Release what is left, but the gradients in `staying`, which live until their update is over."""
        for index in self._of_micro_batch:
            if index in staying:
                self._gradients.append((index, self._live.pop(index)))
            else:
                self.release(index)
        self._of_micro_batch.clear()

    def release_gradients(self, owned: Container[int]) -> None:
        """Release those gradients of earlier micro-batches that an updater owns."""
        for index, block in self._gradients:
            if index in owned:
                self.allocator.release(block, self._sizes[index])
        self._gradients = [(index, block) for index, block in self._gradients if index not in owned]
