"""Replay the trace of a step through CUDA's caching allocator, to predict reserved memory as well as allocated.

The allocator requests segments from the driver, splits them into blocks, and returns none of them unless it has to.
Reserved memory is what `nvidia-smi` shows and what has to fit a budget.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from memory.predict.prediction import MIB

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
        self.limits, self.expandable_segments = limits, limits.expandable_segments
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
            block = self._extend(pool, size) if self.expandable_segments else self._new_segment(size)
        if self._is_split(pool, block, size):
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
                if self.expandable_segments:
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
        rest = [hole.cut(grown)] if grown < hole.size else []
        for part in rest:
            part.is_mapped = False
        pool.holes[position : position + 1] = rest
        hole.is_mapped = True
        self._reserve(grown)

    def _is_split(self, pool: _Pool, block: _Block, size: int) -> bool:
        """Return whether what a request leaves of its block becomes a block of its own."""
        rest = block.size - size
        if pool.is_small or self.expandable_segments:
            return rest >= ALIGNMENT
        return rest > SMALL_REQUEST and size < self.limits.max_split_bytes


def replay(
    trace: Iterable[int], sizes: Sequence[int], limits: AllocatorLimits, emptied: Container[int] = ()
) -> CachingAllocator:
    """Run a trace through the allocator and return the allocator.

    trace: an allocation is its index into `sizes`, a release the complement of that index; sizes of 0 are skipped.
    emptied: before which events the cache is emptied.
    """
    allocator = CachingAllocator(limits)
    blocks: dict[int, _Block | None] = {}
    for position, event in enumerate(trace):
        if position in emptied:
            allocator.empty_cache()
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
    blocks: dict[int, int] = {}
    for event in trace:
        if event >= 0 and sizes[event]:
            size = blocks[event] = 1 << (sizes[event] - 1).bit_length()
            if free[size]:
                free[size] -= 1
            else:
                reserved += size
        elif event < 0 and ~event in blocks:
            free[blocks.pop(~event)] += 1
    return reserved
