"""Volumes in host memory, whose rows pass through the device: what they take, and how they are copied.

On CUDA all copies run on a stream of their own, one after the other, beside the computation: rows that will be read
next are on their way while the current ones are computed, and rows that were written leave while the next ones are
computed. No copy makes the host wait.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from models.lean.slabs import RowSource, Volume, empty, layout_of_volume, volume_bytes
from runtime.observer import memory_observer
from settings import UserError

GIB = 1 << 30


def host_bytes(nbytes: int, is_pinned: bool) -> int:
    """Return what so many bytes take in host memory; torch pins powers of two."""
    return 1 << (nbytes - 1).bit_length() if is_pinned else nbytes


class Copies:
    """Copies between a device and host memory, in the order in which they are asked for.

    One copy in each direction is on its way at a time; more would take the memory that the host is to save.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._leaving: tuple[Tensor, torch.Event | None] | None = None

    def start(self, target: Tensor, source: Tensor, device: torch.device) -> torch.Event | None:
        """Start a copy that waits for what `device` computes so far; return the event at its end."""
        if device.type != "cuda":
            target.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def leave(self, target: Tensor, source: Tensor, owner: Tensor) -> None:
        """Start a copy to the host of rows of `owner`, whose memory is kept until the next one leaves."""
        copied = self.start(target, source, owner.device)
        self.finish()
        self._leaving = (owner, copied)

    def finish(self) -> None:
        """Let go of what left last, once it has been copied."""
        if self._leaving is not None:
            owner, copied = self._leaving
            arrive(owner, copied)
            self._leaving = None


def arrive(rows: Tensor, copied: torch.Event | None) -> Tensor:
    """Have the device wait for a copy from or to `rows`, and return them."""
    if copied is not None:
        torch.cuda.current_stream(rows.device).wait_event(copied)
    return rows


class HostMemoryError(UserError):
    """A volume needs more host memory than there is."""

    exit_code = 3


class HostSpace:
    """The host memory that volumes of more than `above` bytes may take, `free` bytes in all.

    `on_block` is called after each block of a network that uses it.
    """

    def __init__(self, above: int, free: int, on_block: Callable[[], object] = lambda: None) -> None:
        self.above, self.free, self.on_block = above, free, on_block
        self.copies = Copies()

    def volume(self, like: Volume) -> HostVolume:
        """Return an uninitialised volume of the shape and dtype of `like`; its bytes are free again when it goes."""
        size = host_bytes(volume_bytes(like), like.device.type == "cuda")
        self.free -= size
        volume = HostVolume(like, self.copies)
        weakref.finalize(volume, self._give_back, size)
        return volume

    def _give_back(self, size: int) -> None:
        self.free += size


class TrainingSpace(HostSpace):
    """The host memory of a training, step after step: that of a volume that goes is kept for the next one of its size.

    The copies of all volumes follow one another, so nothing has to wait for the last copies of a volume before its
    memory has another use. `limit`: the bytes that may be taken, by default what is free when the first are taken;
    `is_pinned`: whether to count them as a GPU's.
    """

    def __init__(self, limit: int | None = None, is_pinned: bool = False) -> None:
        super().__init__(above=0, free=sys.maxsize)
        self.taken, self._limit, self._is_pinned = 0, limit, is_pinned
        self._spare: defaultdict[tuple[int, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)

    def volume(self, like: Volume) -> HostVolume:
        """Return an uninitialised volume of the shape and dtype of `like`, in memory of another one if there is some.

        Raise `HostMemoryError` if the host has too little.
        """
        spare = self._spare[like.shape.numel(), like.dtype, like.device]
        if not spare:
            if self._limit is None:
                self._limit = memory_observer().free_host_bytes()
            self.taken += host_bytes(volume_bytes(like), self._is_pinned or like.device.type == "cuda")
            check_host_bytes(self.taken, self._limit, "at least ")
        volume = HostVolume(like, self.copies, spare.pop() if spare else None)
        weakref.finalize(volume, spare.append, volume.memory)
        return volume


def check_host_bytes(needed: int, free: int, about: str = "") -> None:
    """Raise `HostMemoryError` if levels in host memory need more of it than is free."""
    if needed > free:
        raise HostMemoryError(
            f"autoencoder.training.offload_levels: its volumes take {about}{needed / GIB:.1f} GiB of host memory; "
            f"{free / GIB:.1f} GiB are free; make room, set use_nested_checkpointing: true if it is off, or train on "
            "patches (data.patch_size)"
        )


class HostVolume(RowSource):
    """A volume in host memory whose rows are computed on a device: a place for what does not fit there as a whole.

    Rows follow one another in memory, so that each slab is one copy.
    """

    def __init__(self, like: Volume, copies: Copies | None = None, memory: Tensor | None = None) -> None:
        batch, channels, rows, *plane = like.shape
        self.shape, self.dtype, self.device, self.layout = like.shape, like.dtype, like.device, layout_of_volume(like)
        self.statistics: dict[tuple[int, float], tuple[Tensor, Tensor]] = {}
        self._copies = copies or Copies()
        if memory is None:
            is_pinned = like.device.type == "cuda"
            with memory_observer().host_allocation():
                memory = torch.empty(like.shape.numel(), dtype=like.dtype, pin_memory=is_pinned)
        self.memory = memory
        self._rows = memory.view(rows, batch, *plane, channels)

    def start_reading(self, start: int, end: int) -> tuple[Tensor, torch.Event | None]:
        """Start to copy rows to the device; return them and the event to wait for."""
        out = empty(self, rows=end - start)
        return out, self._copies.start(out.movedim((2, 1), (0, -1)), self._rows[start:end], self.device)

    def rows(self, start: int, end: int) -> Tensor:
        """Copy the rows from `start` to `end` to the device."""
        return arrive(*self.start_reading(start, end))

    def write(self, start: int, rows: Tensor) -> None:
        """Copy rows from the device to their place, the first of them to row `start`; they must not change after."""
        place = self._rows[start : start + rows.shape[2]]
        self._copies.leave(place, rows.movedim((2, 1), (0, -1)), rows)


class ReadAhead(RowSource):
    """A volume in host memory that is read from its first row to its last, `length` rows at a time.

    The next rows are on their way while those that were asked for are used.
    """

    def __init__(self, volume: HostVolume, length: int) -> None:
        self._volume, self._length = volume, length
        self.shape, self.dtype, self.device, self.layout = volume.shape, volume.dtype, volume.device, volume.layout
        self._next: tuple[int, int] | None = None
        self._coming: tuple[Tensor, torch.Event | None] | None = None

    def rows(self, start: int, end: int) -> Tensor:
        """Return the rows from `start` to `end`, and start to copy the next ones."""
        out = None if self._coming is None else arrive(*self._coming)
        if out is None or self._next != (start, end):
            out = self._volume.rows(start, end)
        following = (end, min(end + self._length, self.shape[2]))
        is_over = following[0] >= following[1]
        self._next, self._coming = following, None if is_over else self._volume.start_reading(*following)
        return out


class Remembered(RowSource):
    """The rows of another volume, of which the last ones asked for are kept, so that no halo is computed twice."""

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self.shape, self.dtype, self.device, self.layout = source.shape, source.dtype, source.device, source.layout
        self._start = self._end = 0
        self._kept: Tensor | None = None

    def rows(self, start: int, end: int) -> Tensor:
        """Return the rows from `start` to `end`; compute those that are not kept."""
        if self._kept is None or not self._start <= start <= self._end:
            self._kept, self._start, self._end = self._source.rows(start, end), start, end
        elif end > self._end:
            before, known = self._kept[:, :, start - self._start :], self._end - start
            self._kept = empty(self, rows=end - start)
            self._kept[:, :, :known] = before
            self._source.fill(self._kept[:, :, known:], self._end, end)
            self._start, self._end = start, end
        return self._kept[:, :, start - self._start : end - self._start]


def in_order(x: Volume, length: int) -> Volume:
    """Return `x` for a reader that goes from its first row to its last, `length` rows at a time."""
    return ReadAhead(x, length) if isinstance(x, HostVolume) else x


def with_halos(x: Volume, length: int) -> Volume:
    """Return `x` for a reader that goes from its first row to its last and asks for some rows again."""
    x = in_order(x, length)
    return Remembered(x) if isinstance(x, RowSource) else x
