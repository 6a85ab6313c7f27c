"""The building blocks of exact computation in slabs, that is, in groups of rows along the first spatial axis.

Statistics are computed over the whole tensor first. After that, normalisation, SiLU and convolution need only a slab
and a halo of one row on each side. Sums over slabs are kept in full precision. Tensors are (batch, channels, rows,
height, width).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from models.lean import native
from models.lean.layout import layout_of
from models.lean.norm import operators
from models.lean.norm.affine import Norm

MIN_SLAB_VALUES = 20480
"""Smallest channels x rows x height for which torch uses its fast CPU kernel for an fp32 convolution of one volume.

Thinner slabs took 15 times as long and would save only 80 KB per voxel of width.
"""


class RowSource(ABC):
    """A volume whose rows are computed on demand; stands in for a tensor where only rows are read."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layout: torch.memory_format

    @abstractmethod
    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`, which must lie inside the volume."""

    def fill(self, target: Tensor, start: int, end: int) -> None:
        """Write the rows from `start` to `end` into `target`."""
        target.copy_(self.rows(start, end))


Volume = Tensor | RowSource


def slabs(x: Volume, rows: int, channels: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Return start and end of each slab of about `rows` rows, for convolutions of at least `channels` channels."""
    total, height = x.shape[2], x.shape[3]
    if dtype == torch.float32:
        fewest = MIN_SLAB_VALUES // (channels * height) + 1
        rows = max(rows, fewest + fewest % 2)
    return [(start, min(start + rows, total)) for start in range(0, total, rows)]


def read(x: Volume, start: int, end: int) -> Tensor:
    """Return the rows from `start` to `end` of `x`; of a tensor, a view."""
    return x[:, :, start:end] if isinstance(x, Tensor) else x.rows(start, end)


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


def rows_of(x: Volume, start: int, end: int) -> Tensor:
    """Return the rows from `start` to `end` as a dense tensor, with zeros outside `x`.

    With channels last, rows of a single volume are already dense and are not copied.
    """
    inside = read(x, max(start, 0), min(end, x.shape[2]))
    if start < 0 or end > x.shape[2]:
        inside = F.pad(inside, (0, 0, 0, 0, max(-start, 0), max(end - x.shape[2], 0)))
    return inside.contiguous(memory_format=layout_of(inside))


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


class Statistics:
    """Mean and 1 / sqrt(variance + eps) of each group, combined from the moments of slabs.

    Squared distances are taken from each slab's own mean, so a large mean costs no precision. All slabs but the last
    have equally many rows.
    """

    def __init__(self, x: Volume, slabs: list[tuple[int, int]], groups: int, eps: float) -> None:
        dtype = torch.promote_types(x.dtype, torch.float32)
        self.eps, self._slabs = eps, slabs
        self._parts = torch.empty((2, len(slabs), x.shape[0], groups), dtype=dtype, device=x.device)
        self._next = 0

    def add(self, slab: Tensor, store: Tensor | None = None) -> None:
        """Add the moments of the next slab and copy the slab to `store`, if given."""
        mean, rstd = self._parts[:, self._next]
        if store is None:
            for target, values in zip((mean, rstd), operators.statistics(slab, mean.shape[1], 0.0), strict=True):
                target.copy_(values)
        else:
            operators.store_statistics(store, mean, rstd, slab, 0.0)
        self._next += 1

    def result(self) -> tuple[Tensor, Tensor]:
        """Return mean and rstd, both (batch, groups)."""
        assert self._next == len(self._slabs), "result needs the moments of every slab"
        counts = [end - start for start, end in self._slabs]
        each, rstds = self._parts
        # Filled in place, because copying a list to a GPU would wait for it.
        share = each.new_full((len(counts), 1, 1), counts[0] / sum(counts))
        share[-1] = counts[-1] / sum(counts)
        mean = (share * each).sum(0)
        variance = (share * (rstds.pow(-2) + (each - mean).square())).sum(0)
        return mean, (variance + self.eps).rsqrt()


class NormedRows:
    """The rows of `x` after a norm and perhaps SiLU, and the backward pass from their gradient to that of `x`.

    Backward visits each row twice. `absorb` adds the row's gradient to the sums and stores what is to be kept of it;
    after `finish`, `input_grad` turns what was kept into the gradient of `x`.
    """

    def __init__(self, x: Volume, norm: Norm, dtype: torch.dtype) -> None:
        self.x, self.norm, self.dtype = x, norm, dtype
        self._sums: list[Tensor] = []
        self._group_means: Tensor | None = None

    def rows(self, start: int, end: int) -> Tensor:
        """Return the rows from `start` to `end`; rows outside the volume are zero, as in a padded convolution."""
        first, last = max(start, 0), min(end, self.x.shape[2])
        x = read(self.x, first, last)
        return operators.normalise(x, self.norm, self.dtype, first - start, end - last)

    def absorb(self, grad: Tensor, start: int, end: int, store: Tensor) -> None:
        """Add the gradient of `rows(start, end)` to the sums and write what `input_grad` needs of it to `store`."""
        x = read(self.x, start, end)
        sums = self.norm.mean.new_empty((2, *x.shape[:2]))
        operators.store_norm_sums(store, sums, grad, x, self.norm)
        self._sums.append(sums)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Close the sums and return the gradients of weight and bias."""
        assert self._sums, "finish needs the sums: call absorb for every slab first"
        count = self.x.shape.numel() // self.norm.mean.numel()
        sums = torch.stack(self._sums).sum(0)
        self._group_means = operators.group_means(sums, self.norm.weight, self.norm.groups, count)
        grad_bias, grad_weight = sums.sum(1)
        return grad_weight, grad_bias

    def input_grad(
        self, kept: Tensor, start: int, end: int, plus: Tensor | None = None, is_absorbed: bool = True
    ) -> None:
        """Replace what `absorb` stored for these rows by the gradient of `x`, with `plus` added to it.

        Rows that are not absorbed are what `absorb` takes.
        """
        assert self._group_means is not None, "input_grad needs the sums over all rows: call finish first"
        is_before_silu = is_absorbed and operators.stores_before_silu(kept)
        norm = self.norm._replace(silu=self.norm.silu and not is_before_silu)
        x = read(self.x, start, end)
        operators.norm_input_grad(kept, kept, x, norm, self._group_means, plus)


class ConvolvedRows(RowSource):
    """A 3x3x3 convolution of a volume, or of its normed rows, computed on demand."""

    def __init__(self, source: NormedRows | Volume, weight: Tensor, bias: Tensor) -> None:
        x = source.x if isinstance(source, NormedRows) else source
        self.source, self.weight, self.bias = source, weight, bias
        self.dtype, self.device, self.layout = weight.dtype, weight.device, layout_of_volume(x)
        self.shape = torch.Size((x.shape[0], weight.shape[0], *x.shape[2:]))

    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`."""
        if isinstance(self.source, NormedRows):
            return convolve(self.source.rows(start - 1, end + 1), self.weight, self.bias)
        with torch.autocast(self.device.type, enabled=False):
            return convolve(rows_of(self.source, start - 1, end + 1).to(self.dtype), self.weight, self.bias)
