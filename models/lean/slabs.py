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

from models.lean import native, norm_operators
from models.lean.norm import FULL_PRECISION

MIN_SLAB_VALUES = 20480
"""Smallest channels x rows x height for which torch uses its fast CPU kernel for an fp32 convolution of one volume.

Thinner slabs took 15 times as long and would save only 80 KB per voxel of width.
"""


class RowSource(ABC):
    """A volume whose rows are computed on demand; stands in for a tensor where only rows are read."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`, which must lie inside the volume."""


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


def rows_of(x: Volume, start: int, end: int) -> Tensor:
    """Return the rows from `start` to `end` as a contiguous tensor, with zeros outside `x`."""
    inside = read(x, max(start, 0), min(end, x.shape[2]))
    if start < 0 or end > x.shape[2]:
        inside = F.pad(inside, (0, 0, 0, 0, max(-start, 0), max(end - x.shape[2], 0)))
    return inside.contiguous()


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

    Squared distances are taken from each slab's own mean, so a large mean costs no precision.
    """

    def __init__(self, groups: int, eps: float) -> None:
        self.groups, self.eps = groups, eps
        self._parts: list[tuple[int, Tensor, Tensor]] = []

    def add(self, slab: Tensor) -> None:
        """Add the moments of one slab. All slabs but the last must have the same number of rows."""
        mean, rstd = norm_operators.statistics(slab, self.groups, 0.0)
        self._parts.append((slab.shape[2:].numel(), mean, rstd.pow(-2)))

    def result(self) -> tuple[Tensor, Tensor]:
        """Return mean and rstd, both (batch, groups)."""
        counts, means, variances = zip(*self._parts, strict=True)
        each = torch.stack(means)
        # Filled in place, because copying a list to a GPU would wait for it.
        share = each.new_full((len(counts), 1, 1), counts[0] / sum(counts))
        share[-1] = counts[-1] / sum(counts)
        mean = (share * each).sum(0)
        variance = (share * (torch.stack(variances) + (each - mean).square())).sum(0)
        return mean, (variance + self.eps).rsqrt()


class NormedRows:
    """The rows of `x` after a norm and perhaps SiLU, and the backward pass from their gradient to that of `x`.

    Backward visits each row twice. `absorb` adds the row's gradient to the sums and returns what to keep of it; after
    `finish`, `input_grad` turns what was kept into the gradient of `x`.
    """

    def __init__(
        self, x: Volume, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, silu: bool, dtype: torch.dtype
    ) -> None:
        self.x, self.mean, self.rstd, self.silu, self.dtype = x, mean, rstd, silu, dtype
        self._norm = (mean, rstd, weight, bias)
        # In full precision the gradient before SiLU is kept, which saves computing SiLU's gradient a second time. In
        # low precision it would be rounded once more, so the gradient is kept as it came.
        self._keeps_grad_before_silu = silu and x.dtype in FULL_PRECISION
        self._sums: Tensor | None = None
        self._group_means: Tensor | None = None

    def rows(self, start: int, end: int) -> Tensor:
        """Return the rows from `start` to `end`; rows outside the volume are zero, as in a padded convolution."""
        first, last = max(start, 0), min(end, self.x.shape[2])
        x = read(self.x, first, last)
        return norm_operators.normalise(x, *self._norm, self.silu, self.dtype, first - start, end - last)

    def absorb(self, grad: Tensor, start: int, end: int) -> Tensor:
        """Add the gradient of `rows(start, end)` to the sums and return what `input_grad` needs of it."""
        x, silu = read(self.x, start, end), self.silu
        if self._keeps_grad_before_silu:
            grad = native.silu_backward_(grad, norm_operators.normalise(x, *self._norm, False, x.dtype))
            silu = False
        sums = norm_operators.norm_sums(grad, x, *self._norm, silu)
        self._sums = sums if self._sums is None else self._sums.add_(sums)
        return grad

    def finish(self) -> tuple[Tensor, Tensor]:
        """Close the sums and return the gradients of weight and bias."""
        assert self._sums is not None, "finish needs the sums: call absorb for every slab first"
        _, _, weight, _ = self._norm
        count = self.x.shape.numel() // self.mean.numel()
        self._group_means = norm_operators.group_means(self._sums, weight, self.mean.shape[1], count)
        grad_bias, grad_weight = self._sums.sum(1)
        return grad_weight, grad_bias

    def input_grad(self, kept: Tensor, start: int, end: int, plus: Tensor | None = None) -> None:
        """Replace what `absorb` returned for these rows by the gradient of `x`, with `plus` added to it."""
        assert self._group_means is not None, "input_grad needs the sums over all rows: call finish first"
        silu = self.silu and not self._keeps_grad_before_silu
        x = read(self.x, start, end)
        norm_operators.norm_input_grad(kept, kept, x, *self._norm, self._group_means, silu, plus)


class ConvolvedRows(RowSource):
    """A 3x3x3 convolution of normed rows, computed on demand."""

    def __init__(self, source: NormedRows, weight: Tensor, bias: Tensor) -> None:
        self.source, self.weight, self.bias = source, weight, bias
        self.dtype, self.device = weight.dtype, weight.device
        self.shape = torch.Size((source.x.shape[0], weight.shape[0], *source.x.shape[2:]))

    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`."""
        return convolve(self.source.rows(start - 1, end + 1), self.weight, self.bias)
