"""Trilinear upsampling and a convolution, as in MAISI's decoder, in slabs: the enlarged volume never exists as a whole.

Only the input is saved. torch's own trilinear upsampling adds gradients in no fixed order on a GPU; this one does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.lean import native
from models.lean.layout import layout_of
from models.lean.norm import compute_dtype, full_precision
from models.lean.resampling import Strides
from models.lean.slabs import (
    ConvolvedRows,
    RowSource,
    Volume,
    bias_grad,
    convolve_backward,
    empty,
    layout_of_volume,
    read,
    rows_of,
    slabs,
)

ROWS = 16
"""Rows of the enlarged volume that are computed at a time where the settings do not say."""


def _doubled(x: Tensor, axis: int) -> Tensor:
    """Double one axis: each voxel becomes two, which take a quarter of the nearest neighbour on their side.

    Beyond the ends the outermost voxels are repeated.
    """
    size = x.shape[axis]
    shape = [*x.shape[:axis], 2 * size, *x.shape[axis + 1 :]]
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout_of(x))
    pairs = out.unflatten(axis, (size, 2))
    for side in (0, 1):
        half = pairs.select(axis + 1, side)
        half.copy_(x)
        inner, neighbour = (half.narrow(axis, 1 - side, size - 1), x.narrow(axis, side, size - 1))
        inner.lerp_(neighbour, 0.25)
    return out


def _doubled_backward(grad: Tensor, axis: int) -> Tensor:
    """Return the gradient of the input of `_doubled`."""
    size = grad.shape[axis] // 2
    first, second = grad.unflatten(axis, (size, 2)).unbind(axis + 1)
    out = torch.add(first, second)
    for side, part in ((0, first), (1, second)):
        # A quarter of each half's gradient belongs to the neighbour, except at the end that has none.
        moved = part.narrow(axis, 1 - side, size - 1)
        out.narrow(axis, 1 - side, size - 1).sub_(moved, alpha=0.25)
        out.narrow(axis, side, size - 1).add_(moved, alpha=0.25)
    return out


class Enlarged(RowSource):
    """The interpolated volume in `dtype`, computed row by row from the small one in full precision."""

    def __init__(self, x: Volume, strides: Strides, dtype: torch.dtype) -> None:
        self.x, self.strides, self.dtype, self.device = x, tuple(strides), dtype, x.device
        self.layout = layout_of_volume(x)
        grid = (size * stride for size, stride in zip(x.shape[2:], strides, strict=True))
        self.shape = torch.Size((*x.shape[:2], *grid))
        self._axes = [axis for axis, stride in zip((2, 3, 4), strides, strict=True) if stride == 2]

    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`."""
        first, last = self._needed(start, end)
        rows = full_precision(read(self.x, first, last))
        for axis in self._axes:
            rows = _doubled(rows, axis)
        start, end = start - self.strides[0] * first, end - self.strides[0] * first
        return rows[:, :, start:end].to(self.dtype, memory_format=self.layout)

    def small_grad(self, grad: Tensor, start: int) -> tuple[int, Tensor]:
        """Return what the gradient of the rows from `start` gives to the small volume's, and its first row there."""
        first, last = self._needed(start, start + grad.shape[2])
        before = start - self.strides[0] * first
        wide = rows_of(full_precision(grad), -before, self.strides[0] * (last - first) - before)
        for axis in reversed(self._axes):
            wide = _doubled_backward(wide, axis)
        return first, wide

    def _needed(self, start: int, end: int) -> tuple[int, int]:
        """Return the small rows that the rows from `start` to `end` depend on, with those that give them their ends.

        Interpolation repeats the outermost rows. Inside the volume that is wrong, but such rows are cut off.
        """
        stride = self.strides[0]
        return max(start // stride - stride + 1, 0), min(-(-end // stride) + stride - 1, self.x.shape[2])


def interpolated_rows(x: Volume, weight: Tensor, bias: Tensor, strides: Strides, dtype: torch.dtype) -> ConvolvedRows:
    """Return the interpolated and convolved volume as rows computed from the small one."""
    return ConvolvedRows(Enlarged(x, strides, dtype), weight.to(dtype), bias.to(dtype))


class _InterpolatedConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, strides: Strides, dtype: torch.dtype, rows: int
    ) -> Tensor:
        source = interpolated_rows(x, weight, bias, strides, dtype)
        out = empty(source)
        for start, end in slabs(source, rows, min(weight.shape[:2]), dtype):
            out[:, :, start:end] = source.rows(start, end)
        ctx.save_for_backward(x, weight)
        ctx.strides, ctx.dtype, ctx.rows = strides, dtype, rows
        return out

    @staticmethod
    @native.first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        total = torch.zeros_like(full_precision(x)) if needs_x else None
        sums = torch.zeros_like(full_precision(weight)) if needs_weight else None
        with torch.autocast(x.device.type, enabled=False):
            enlarged = Enlarged(x, ctx.strides, ctx.dtype)
            low, kernel = grad.to(ctx.dtype), weight.to(ctx.dtype)
            for start, end in slabs(enlarged, ctx.rows, min(weight.shape[:2]), ctx.dtype):
                rows = enlarged.rows(start, end)
                of_rows, of_weight = convolve_backward(
                    rows_of(low, start - 1, end + 1), rows, kernel, (needs_x, needs_weight)
                )
                if sums is not None:
                    sums += of_weight
                if total is not None:
                    first, part = enlarged.small_grad(of_rows, start)
                    total[:, :, first : first + part.shape[2]] += part
            of_bias = bias_grad(grad) if needs_bias else None
        return None if total is None else total.to(x.dtype), sums, of_bias, None, None, None


def interpolated_conv(x: Tensor, conv: nn.Conv3d, strides: Strides = (2, 2, 2), rows: int = 0) -> Tensor:
    """Enlarge each axis by its stride, by linear interpolation, and apply a 3x3x3 convolution.

    The enlarged volume is computed `rows` rows at a time.
    """
    return _InterpolatedConv.apply(x, conv.weight, conv.bias, strides, compute_dtype(x), rows or ROWS)
