"""What exact computation in slabs is made of: rows along the first spatial axis, with zeros beyond the volume's ends.

Statistics are taken over the whole tensor first; after that, normalisation, SiLU and convolution need only a slab and
one row on each side. Sums over slabs are kept in full precision. Tensors are (batch, channels, rows, height, width).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from models.lean import native
from models.lean.norm import FULL_PRECISION, full_precision, scale_and_shift, spread

MIN_SLAB_VALUES = 20480
"""Channels x rows x height from which torch runs an fp32 convolution of one volume through its fast CPU kernel.

Thinner slabs took 15 times as long and save next to nothing: they hold 80 KB per voxel of width.
"""


class RowSource(ABC):
    """A volume that exists only as rows computed on demand; takes the place of a tensor where rows are read."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`, which lie inside of the volume."""


Volume = Tensor | RowSource


def slabs(x: Volume, rows: int, channels: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Return start and end of each slab of about `rows` rows, for convolutions of at least `channels` channels."""
    total, height = x.shape[2], x.shape[3]
    if dtype == torch.float32:
        fewest = MIN_SLAB_VALUES // (channels * height) + 1
        rows = max(rows, fewest + fewest % 2)
    return [(start, min(start + rows, total)) for start in range(0, total, rows)]


def read(x: Volume, start: int, end: int) -> Tensor:
    """Return the rows from `start` to `end` of `x`, a view of them where they exist."""
    return x[:, :, start:end] if isinstance(x, Tensor) else x.rows(start, end)


def rows_of(x: Volume, start: int, end: int) -> Tensor:
    """Return the rows from `start` to `end` as a dense tensor, zeros where they lie outside of `x`."""
    inside = read(x, max(start, 0), min(end, x.shape[2]))
    if start < 0 or end > x.shape[2]:
        inside = F.pad(inside, (0, 0, 0, 0, max(-start, 0), max(end - x.shape[2], 0)))
    return inside.contiguous()


def convolve(haloed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve rows that come with one row more on each side."""
    return F.conv3d(haloed, weight, bias, padding=(0, 1, 1))


def convolve_backward(
    grad_haloed: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows of the input and, from these rows, of the weight.

    The gradient of the output comes with one row more on each side. To the rows without halo it is the gradient of a
    convolution padded by two, so both results are exact in one call and no row is ever computed twice.
    """
    return native.convolution_backward(grad_haloed, x, weight, needs, padding=(2, 1, 1))


def bias_grad(grad: Tensor) -> Tensor:
    """Return the gradient of a convolution's bias in full precision."""
    return grad.sum((0, 2, 3, 4), dtype=torch.promote_types(grad.dtype, torch.float32))


class Statistics:
    """Mean and variance of each group, gathered slab by slab with the slabs' own moments, so nothing cancels."""

    def __init__(self, groups: int, eps: float) -> None:
        self.groups, self.eps = groups, eps
        self._parts: list[tuple[int, Tensor, Tensor]] = []

    def add(self, values: Tensor) -> None:
        """Take in the next rows."""
        values = full_precision(values)
        _, mean, rstd = native.group_norm(values, None, None, self.groups, self.eps)
        self._parts.append((values.shape[2:].numel(), mean, rstd.pow(-2) - self.eps))

    def result(self) -> tuple[Tensor, Tensor]:
        """Return mean and rstd, each of shape (batch, groups)."""
        counts, means, variances = zip(*self._parts, strict=True)
        each = torch.stack(means)
        # All slabs but the last have as many voxels. Filled where it lies: copying a list there would stop a GPU.
        share = each.new_full((len(counts), 1, 1), counts[0] / sum(counts))
        share[-1] = counts[-1] / sum(counts)
        mean = (share * each).sum(0)
        variance = (share * (torch.stack(variances) + (each - mean).square())).sum(0)
        return mean, (variance + self.eps).rsqrt()


class NormedRows:
    """The normalised and perhaps activated rows of `x`, and the way back from their gradient to that of `x`.

    Backward visits each row twice: `absorb` takes the gradient of the activation and returns what to keep of it, and
    once all rows are absorbed, `input_grad` turns what was kept into the gradient of `x`.
    """

    def __init__(
        self, x: Volume, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, silu: bool, dtype: torch.dtype
    ) -> None:
        self.x, self.mean, self.rstd, self.weight = x, mean, rstd, full_precision(weight)
        self.silu, self.dtype = silu, dtype
        scale, shift = scale_and_shift(mean, rstd, self.weight, full_precision(bias))
        self._scale, self._shift = spread(scale), spread(shift)
        # A low-precision gradient is kept as it came and goes through SiLU twice: a product would round once more.
        self._keeps_product = x.dtype in FULL_PRECISION
        self._sum_grad = torch.zeros_like(scale)
        self._sum_grad_x = torch.zeros_like(scale)
        self._factors: tuple[Tensor, Tensor, Tensor] | None = None

    def rows(self, start: int, end: int) -> Tensor:
        """Return the rows from `start` to `end`, zeros outside of the volume as a padded convolution sees them."""
        shape = (*self.x.shape[:2], end - start, *self.x.shape[3:])
        out = torch.empty(shape, dtype=self.dtype, device=self.x.device)
        first, last = max(start, 0), min(end, self.x.shape[2])
        self._activate(read(self.x, first, last), out[:, :, first - start : last - start])
        if start < 0:
            out[:, :, :-start] = 0
        if end > last:
            out[:, :, last - start :] = 0
        return out

    def _activate(self, x: Tensor, out: Tensor) -> None:
        if out.dtype == x.dtype and self._keeps_product:
            torch.addcmul(self._shift, x, self._scale, out=out)
            if self.silu:
                F.silu(out, inplace=True)
        else:
            values = self._normed(x)
            out.copy_(F.silu(values, inplace=True) if self.silu else values)

    def _normed(self, x: Tensor) -> Tensor:
        # In full precision without a converted copy of x: the kernel promotes each value as it reads it.
        return torch.addcmul(self._shift, x, self._scale)

    def _before_silu(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the normed values in full precision."""
        if not self.silu:
            return full_precision(grad)
        normed = self._normed(x)
        return native.silu_backward_(grad, normed)

    def absorb(self, grad: Tensor, start: int, end: int) -> Tensor:
        """Take the gradient of `rows(start, end)` into the sums and return what `input_grad` will want to see."""
        x = read(self.x, start, end)
        product = self._before_silu(grad, x)
        self._sum_grad += product.sum((2, 3, 4))
        self._sum_grad_x += (product * x if self._keeps_product else product.mul_(x)).sum((2, 3, 4))
        return product if self._keeps_product else grad

    def finish(self) -> tuple[Tensor, Tensor]:
        """Close the sums and return the gradients of weight and bias."""
        batch, channels = self._sum_grad.shape
        groups = self.mean.shape[1]
        size = channels // groups
        mean, rstd = self.mean.repeat_interleave(size, 1), self.rstd.repeat_interleave(size, 1)
        grad_weight = ((self._sum_grad_x - self._sum_grad * mean) * rstd).sum(0)
        grad_bias = self._sum_grad.sum(0)

        # y = scale * x + shift, and both depend on x through mean and rstd: the gradient is linear in grad and x.
        count = size * self.x.shape[2:].numel()
        by_group = (batch, groups, size)
        sum_grad = (self._sum_grad * self.weight).view(by_group).sum(2)
        sum_grad_x = (self._sum_grad_x * self.weight).view(by_group).sum(2)
        of_x = (sum_grad * self.mean - sum_grad_x) * self.rstd.pow(3) / count
        constant = -of_x * self.mean - sum_grad * self.rstd / count
        of_x, constant = (spread(values.repeat_interleave(size, 1)) for values in (of_x, constant))
        self._factors = (self._scale, of_x, constant)
        return grad_weight, grad_bias

    def input_grad(self, kept: Tensor, start: int, end: int) -> Tensor:
        """Return the gradient of the rows of `x` in full precision, from what `absorb` returned for them."""
        assert self._factors is not None, "input_grad needs the sums over all rows: call finish first"
        of_grad, of_x, constant = self._factors
        x = read(self.x, start, end)
        product = kept if self._keeps_product else self._before_silu(kept, x)
        return torch.addcmul(constant, x, of_x).addcmul_(product, of_grad)


class ConvolvedRows(RowSource):
    """A 3x3x3 convolution of normed rows, computed on demand."""

    def __init__(self, source: NormedRows, weight: Tensor, bias: Tensor) -> None:
        self.source, self.weight, self.bias = source, weight, bias
        self.dtype, self.device = weight.dtype, weight.device
        self.shape = torch.Size((source.x.shape[0], weight.shape[0], *source.x.shape[2:]))

    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`."""
        return convolve(self.source.rows(start - 1, end + 1), self.weight, self.bias)
