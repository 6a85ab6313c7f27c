"""Replay the trace of a step through CUDA's caching allocator, to predict reserved memory as well as allocated.

The allocator requests segments from the driver, splits them into blocks, and returns none of them unless it has to.
Reserved memory is what `nvidia-smi` shows and what has to fit a budget.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from memory.predict.prediction import MIB

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
    """A piece of a segment, which has a number; `address` counts from its start; `is_mapped`: memory is behind it."""

    size: int
    segment: int
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None
    address: int = 0
    is_mapped: bool = True


@dataclass(slots=True)
class _Pool:
    """The free blocks of one pool, ordered by size for best fit, and the last block of its expandable segment.

    Among blocks of one size the oldest segment comes first, and in it the lowest address.
    """

    is_small: bool
    is_expandable: bool
    free: list[tuple[int, int, int, _Block]] = field(default_factory=list)
    last: _Block | None = None
    unmapped: list[_Block] = field(default_factory=list)

    @property
    def page(self) -> int:
        """Return in which steps an expandable segment grows and shrinks."""
        return SMALL_SEGMENT if self.is_small else LARGE_SEGMENT

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
        for *_, larger in self.free[position + 1 :] if self.is_expandable else ():
            if self._possible_size(larger) >= self._possible_size(found):
                break
            found = larger
        return found if limits.allow(size, found.size) else None

    def _possible_size(self, block: _Block) -> float:
        """Return what a block counts as: all that it can become by mapping what follows it."""
        if block is self.last:
            return math.inf
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
        self._free(pool, block)

    def _free(self, pool: _Pool, block: _Block) -> None:
        if block.before is not None and block.before.is_free:
            pool.remove(block.before)
            block = self._merge(pool, block.before, block)
        if block.after is not None and block.after.is_free:
            pool.remove(block.after)
            block = self._merge(pool, block, block.after)
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
        start = round_up(block.address, pool.page)
        end = (block.address + block.size) // pool.page * pool.page
        if end <= start:
            return
        pool.remove(block)
        middle = block
        if start > block.address:
            middle = self._cut(pool, block, start - block.address)
            pool.add(block)
        if end < middle.address + middle.size:
            pool.add(self._cut(pool, middle, end - middle.address))
        middle.is_mapped = False
        self.reserved -= middle.size
        self._add_hole(pool, middle)

    def _add_hole(self, pool: _Pool, hole: _Block) -> None:
        """Merge a hole with those beside it; at the end of the segment it becomes part of what was never mapped."""
        before, after = hole.before, hole.after
        if before is not None and not before.is_mapped:
            pool.unmapped.remove(before)
            hole = self._merge(pool, before, hole)
        if after is not None and not after.is_mapped:
            pool.unmapped.remove(after)
            hole = self._merge(pool, hole, after)
        if pool.last is hole:
            pool.last = hole.before
            if hole.before is not None:
                hole.before.after = None
        else:
            pool.unmapped = sorted([*pool.unmapped, hole], key=lambda other: other.address)

    def _cut(self, pool: _Pool, block: _Block, size: int) -> _Block:
        """Shorten a block to `size` and return the rest as a block of its own."""
        rest = _Block(block.size - size, block.segment, before=block, after=block.after)
        rest.address = block.address + size
        if block.after is not None:
            block.after.before = rest
        if pool.last is block:
            pool.last = rest
        block.after, block.size = rest, size
        return rest

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
        """Map memory at the first address with enough room: in a hole and what is free around it, or at the end."""
        for hole in pool.unmapped:
            first = hole.before if hole.before is not None and hole.before.is_free else hole
            room, block = first.size, first.after
            while room < size and block is not None and (block.is_free or not block.is_mapped):
                room, block = room + block.size, block.after
            if room >= size or block is None:
                return self._grown(pool, first, size)
        end = pool.last if pool.last is not None and pool.last.is_free else None
        return self._grown(pool, end, size)

    def _grown(self, pool: _Pool, block: _Block | None, size: int) -> _Block:
        """Map what follows a free block, or what a hole is, until there is one block of at least `size`."""
        if block is not None and block.is_mapped:
            pool.remove(block)
        while block is None or not block.is_mapped or block.size < size:
            missing = size - (block.size if block is not None and block.is_mapped else 0)
            hole = block if block is not None and not block.is_mapped else block.after if block is not None else None
            mapped = self._map(pool, hole, missing)
            block = mapped if block is None or block is hole else self._merge(pool, block, mapped)
            if block.after is not None and block.after.is_free:
                pool.remove(block.after)
                block = self._merge(pool, block, block.after)
        return block

    def _map(self, pool: _Pool, hole: _Block | None, nbytes: int) -> _Block:
        """Map the first pages of a hole, or new ones at the end of the segment."""
        grown = round_up(nbytes, pool.page)
        if hole is None:
            end = pool.last
            block = _Block(grown, 0, before=end)
            if end is not None:
                block.address, end.after = end.address + end.size, block
            pool.last = block
        else:
            block, grown = hole, min(grown, hole.size)
            pool.unmapped.remove(hole)
            hole.is_mapped = True
            if grown < hole.size:
                rest = self._cut(pool, hole, grown)
                rest.is_mapped = False
                self._add_hole(pool, rest)
        self._reserve(grown)
        return block

    def _split(self, pool: _Pool, block: _Block, size: int) -> None:
        rest = block.size - size
        if pool.is_small or self.expandable_segments:
            is_worth_it = rest >= ALIGNMENT
        else:
            is_worth_it = rest > SMALL_REQUEST and size < self.limits.max_split_bytes
        if not is_worth_it:
            return
        pool.add(self._cut(pool, block, size))

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
    """Run a trace through the allocator of pinned memory and return the bytes that it takes from the host."""
    allocator = PinnedAllocator()
    blocks: dict[int, int] = {}
    for event in trace:
        if event >= 0 and sizes[event]:
            blocks[event] = allocator.allocate(sizes[event])
        elif event < 0 and ~event in blocks:
            allocator.release(blocks.pop(~event))
    return allocator.reserved
