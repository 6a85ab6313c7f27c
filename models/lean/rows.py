"""Volumes that are read in slabs, rows along the first spatial axis: on the device, computed, or in host memory.

After its statistics are known, a norm, SiLU and a convolution need only a slab and a halo of one row on each side. On
CUDA all copies from and to host memory run on a stream of their own, one after the other, beside the computation: rows
that will be read next are on their way while the current ones are computed, and rows that were written leave while the
next ones are computed. No copy makes the host wait. Tensors are (batch, channels, rows, height, width).
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.lean import native
from models.lean.layout import CHANNELS_LAST, layout_of
from models.lean.norm.operators import group_means, norm_input_grad, normalise, store_norm_sums, stores_before_silu
from models.lean.norm.torch_kernels import Norm
from runtime.observer import memory_observer
from settings import UserError

GIB = 1 << 30


class RowSource(ABC):
    """A volume that is no tensor; stands in for one where only rows are read."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layout: torch.memory_format

    def __init__(self, like: Volume, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None) -> None:
        self.shape = torch.Size(like.shape if shape is None else shape)
        self.dtype, self.device, self.layout = dtype or like.dtype, like.device, layout_of_volume(like)

    @abstractmethod
    def rows(self, start: int, end: int) -> Tensor:
        """Return the rows from `start` to `end`, which must lie inside the volume."""


Volume = Tensor | RowSource
CountedVolume = TypeVar("CountedVolume", bound=Volume)


class ComputedRows(RowSource):
    """Rows that a function of their start and end computes whenever they are read.

    `then`, where it is given, returns what a pointwise convolution makes of them without computing the rows first;
    `source`, where it is given, is what they are computed from and nobody else reads.
    """

    then: Callable[[nn.Conv3d], ComputedRows] | None = None
    source: Relocatable | None = None

    def __init__(
        self,
        like: Volume,
        compute: Callable[[int, int], Tensor],
        dtype: torch.dtype | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__(like, dtype, shape)
        self._compute = compute

    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`."""
        return self._compute(start, end)


class Relocatable(RowSource):
    """A tensor that makes room for what is computed from it: it can move into the memory of that volume."""

    _APART = 5
    """So many of the last rows stay apart: without them, no row is overwritten that is still to be read."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x)
        self._tensor = x
        self._apart = x[:, :, x.shape[2] :]

    def rows(self, start: int, end: int) -> Tensor:
        """Return the rows from `start` to `end`."""
        count = self._tensor.shape[2]
        if end <= count:
            return self._tensor[:, :, start:end]
        apart = self._apart[:, :, max(start - count, 0) : end - count]
        return apart if start >= count else torch.cat([self._tensor[:, :, start:], apart], 2)

    def move_to_end(self, place: Tensor) -> int:
        """Move the rows to the end of `place`; return how many rows at its start are free, 0 if they cannot move.

        `place` may then be written from its first row to its last, as the rows that these depend on are read.
        """
        is_dense = self.layout == layout_of(place) == CHANNELS_LAST and len(self._tensor) == 1
        count = self.shape[2] - self._APART
        if not is_dense or count < 1 or self.dtype != place.dtype or volume_bytes(self) > volume_bytes(place):
            return 0
        before, after = self._tensor[:, :, :count], self._tensor[:, :, count:].clone(memory_format=CHANNELS_LAST)
        at_end = place.movedim(1, -1).view(-1)[-before.numel() :]
        moved = at_end.view(before.movedim(1, -1).shape).movedim(-1, 1)
        moved.copy_(before)
        self._tensor, self._apart = moved, after
        return (place.numel() - before.numel()) // place[:, :, 0].numel()


def read(x: Volume, start: int, end: int) -> Tensor:
    """Return the rows from `start` to `end` of `x`; of a tensor, a view."""
    return x[:, :, start:end] if isinstance(x, Tensor) else x.rows(start, end)


def write(volume: Volume, start: int, rows: Tensor) -> None:
    """Write rows of a volume, on the device or on the host, the first of them to row `start`."""
    if isinstance(volume, Tensor):
        volume[:, :, start : start + rows.shape[2]] = rows
    else:
        assert isinstance(volume, HostVolume), "rows that are computed on demand have no place"
        volume.write(start, rows.to(volume.dtype))


def rows_of(x: Volume, start: int, end: int) -> Tensor:
    """Return the rows from `start` to `end` as a dense tensor, with zeros outside `x`.

    With channels last, rows of a single volume are already dense and are not copied.
    """
    inside = read(x, max(start, 0), min(end, x.shape[2]))
    if start < 0 or end > x.shape[2]:
        inside = F.pad(inside, (0, 0, 0, 0, max(-start, 0), max(end - x.shape[2], 0)))
    return inside.contiguous(memory_format=layout_of(inside))


def volume_bytes(x: Volume) -> int:
    """Return the bytes of a whole volume."""
    return x.shape.numel() * x.dtype.itemsize


def layout_of_volume(x: Volume) -> torch.memory_format:
    """Return the layout of a volume or of its rows."""
    return layout_of(x) if isinstance(x, Tensor) else x.layout


def empty(x: Volume, channels: int | None = None, dtype: torch.dtype | None = None, rows: int | None = None) -> Tensor:
    """Return an uninitialised volume on the grid and in the layout of `x`, or some rows of one."""
    batch, own_channels, own_rows, *plane = x.shape
    shape = (batch, channels or own_channels, rows or own_rows, *plane)
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device, memory_format=layout_of_volume(x))


def convolve(haloed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve rows that include a halo of one row on each side."""
    return F.conv3d(haloed, weight, bias, padding=(0, 1, 1))


def convolve_backward(
    grad_haloed: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input's rows and, from these rows, of the weight.

    The gradient of the output includes a halo of one row on each side. For the rows without halo it is the gradient of
    a convolution padded by two, so one call gives both results exactly and no row is computed twice.
    """
    return native.convolution_backward(grad_haloed, x, weight, needs, padding=(2, 1, 1))


def bias_grad(grad: Tensor) -> Tensor:
    """Return the gradient of a convolution's bias in full precision."""
    return grad.sum((0, 2, 3, 4), dtype=torch.promote_types(grad.dtype, torch.float32))


class NormedRows:
    """The rows of `x` after a norm and perhaps SiLU, and the backward pass from their gradient to that of `x`.

    Backward visits each row twice. `absorb` adds the row's gradient to the sums and stores what is to be kept of it;
    after `finish`, `input_grad` turns what was kept into the gradient of `x`.
    """

    def __init__(self, x: Volume, norm: Norm, dtype: torch.dtype) -> None:
        self.x, self.norm, self.dtype = x, norm, dtype
        self._shared: tuple[int, Tensor] | None = None
        self._sums: list[Tensor] = []
        self._group_means: Tensor | None = None

    def rows(self, start: int, end: int) -> Tensor:
        """Return the rows from `start` to `end`; rows outside the volume are zero, as in a padded convolution."""
        first, last = max(start, 0), min(end, self.x.shape[2])
        return normalise(read(self.x, first, last), self.norm, self.dtype, first - start, end - last)

    def haloed(self, start: int, end: int) -> Tensor:
        """Return the rows with a halo of one on each side; for slabs in order, which share two rows.

        Those are computed once, so that `x` may be overwritten up to the end of the slab before.
        """
        if self._shared is None or self._shared[0] != start or start + 1 == self.x.shape[2]:  # no row is left to read
            out = self.rows(start - 1, end + 1)
        else:
            last = min(end + 1, self.x.shape[2])
            out = normalise(read(self.x, start + 1, last), self.norm, self.dtype, 2, end + 1 - last)
            out[:, :, :2] = self._shared[1]
        self._shared = (end, out[:, :, -2:].clone())
        return out

    def absorb(self, grad: Tensor, start: int, end: int, kept: Volume | None = None) -> None:
        """Add the gradient of `rows(start, end)` to the sums and keep what `input_grad` needs of it.

        It goes into the tensor `kept`, or into `grad` itself and from there into another kind of volume.
        """
        x = read(self.x, start, end)
        sums = self.norm.mean.new_empty((2, *x.shape[:2]))
        store_norm_sums(kept[:, :, start:end] if isinstance(kept, Tensor) else grad, sums, grad, x, self.norm)
        self._sums.append(sums)
        if isinstance(kept, RowSource):
            write(kept, start, grad)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Close the sums and return the gradients of weight and bias."""
        assert self._sums, "finish needs the sums: call absorb for every slab first"
        count = self.x.shape.numel() // self.norm.mean.numel()
        sums = torch.stack(self._sums).sum(0)
        self._group_means = group_means(sums, self.norm.weight, self.norm.groups, count)
        grad_bias, grad_weight = sums.sum(1)
        return grad_weight, grad_bias

    def input_grad(
        self, kept: Tensor, start: int, end: int, plus: Tensor | None = None, is_absorbed: bool = True
    ) -> None:
        """Replace what `absorb` stored for these rows by the gradient of `x`, with `plus` added to it.

        Rows that are not absorbed are what `absorb` takes.
        """
        assert self._group_means is not None, "input_grad needs the sums over all rows: call finish first"
        is_before_silu = is_absorbed and stores_before_silu(kept)
        norm = self.norm._replace(silu=self.norm.silu and not is_before_silu)
        norm_input_grad(kept, kept, read(self.x, start, end), norm, self._group_means, plus)


def convolved_rows(source: NormedRows | Volume, weight: Tensor, bias: Tensor) -> ComputedRows:
    """Return a 3x3x3 convolution of a volume, or of its normed rows, as rows computed on demand."""

    def compute(start: int, end: int) -> Tensor:
        if isinstance(source, NormedRows):
            haloed = source.haloed(start, end) if computed else source.rows(start - 1, end + 1)
            return convolve(haloed, weight, bias)
        with torch.autocast(weight.device.type, enabled=False):
            return convolve(rows_of(source, start - 1, end + 1).to(weight.dtype), weight, bias)

    x = source.x if isinstance(source, NormedRows) else source
    computed = isinstance(x, ComputedRows)
    return ComputedRows(x, compute, weight.dtype, (x.shape[0], weight.shape[0], *x.shape[2:]))


def partly_stored(place: Volume, count: int, x: ComputedRows) -> ComputedRows:
    """Return the rows of `x`, of which the first `count` lie in `place` and the others are computed again."""

    def compute(start: int, end: int) -> Tensor:
        if start >= count:
            return x.rows(start, end)
        known = read(place, start, min(end, count))
        return known if end <= count else torch.cat([known, x.rows(count, end)], 2)

    return ComputedRows(x, compute)


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
            arrive(*self._leaving)
            self._leaving = None


def arrive(rows: Tensor, copied: torch.Event | None) -> Tensor:
    """Have the device wait for a copy from or to `rows`, and return them."""
    if copied is not None:
        torch.cuda.current_stream(rows.device).wait_event(copied)
    return rows


class HostMemoryError(UserError):
    """A volume needs more host memory than there is."""

    exit_code = 3


def host_bytes(nbytes: int, is_pinned: bool) -> int:
    """Return what a tensor of this many bytes takes in host memory; torch pins powers of two."""
    return 1 << (nbytes - 1).bit_length() if is_pinned else nbytes


class HostSpace:
    """The host memory that volumes of more than `above` bytes may take; `free` bytes of it are left.

    `on_block` is called after each block of a network that uses it.
    """

    def __init__(self, above: int, free: int, on_block: Callable[[], object] = lambda: None) -> None:
        self.above, self.free, self.on_block = above, free, on_block
        self.copies = Copies()

    def volume(self, like: Volume) -> HostVolume | Tensor:
        """Return an uninitialised volume of the shape and dtype of `like`; its bytes are free again when it goes."""
        return self._counted(HostVolume(like, self.copies), host_bytes(volume_bytes(like), like.device.type == "cuda"))

    def _counted(self, volume: CountedVolume, size: int) -> CountedVolume:
        self.free -= size
        weakref.finalize(volume, self._give_back, size)
        return volume

    def _give_back(self, size: int) -> None:
        self.free += size


class DeviceSpace(HostSpace):
    """The device's memory in place of the host's: volumes are tensors there."""

    def __init__(self, free: int) -> None:
        super().__init__(above=0, free=free)

    def volume(self, like: Volume) -> Tensor:
        """Return an uninitialised tensor of the shape and dtype of `like`."""
        return self._counted(empty(like), volume_bytes(like))


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
            f"{free / GIB:.1f} GiB are free to this process (limits of cgroups count); make room, set "
            "use_nested_checkpointing: true if it is off, or train on patches (data.patch_size)"
        )


class HostVolume(RowSource):
    """A volume in host memory whose rows are computed on a device: a place for what does not fit there as a whole.

    Rows follow one another in memory, so that each slab is one copy.
    """

    def __init__(self, like: Volume, copies: Copies | None = None, memory: Tensor | None = None) -> None:
        super().__init__(like)
        batch, channels, rows, *plane = like.shape
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
        super().__init__(volume)
        self._volume, self._length = volume, length
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
        super().__init__(source)
        self._source = source
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
            self._kept[:, :, known:].copy_(self._source.rows(self._end, end))
            self._start, self._end = start, end
        return self._kept[:, :, start - self._start : end - self._start]


def in_order(x: Volume, length: int) -> Volume:
    """Return `x` for a reader that goes from its first row to its last, `length` rows at a time."""
    return ReadAhead(x, length) if isinstance(x, HostVolume) else x


def with_halos(x: Volume, length: int) -> Volume:
    """Return `x` for a reader that goes from its first row to its last and asks for some rows again."""
    x = in_order(x, length)
    return Remembered(x) if isinstance(x, RowSource) else x
