"""Upsampling and downsampling, each as one convolution: no enlarged or padded copy, and only the input is saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.lean import native
from models.lean.layout import CONTIGUOUS, arranged, layout_of
from models.lean.norm import compute_dtype, full_precision
from models.lean.slabs import RowSource, Volume, bias_grad, layout_of_volume, rows_of

Strides = Sequence[int]
"""The factors, 1 or 2, by which the three axes are shrunk or enlarged."""


def folded(weight: Tensor, strides: Strides) -> Tensor:
    """Return the kernel of the transposed convolution that upsamples by `strides` and convolves with `weight`.

    Nearest-neighbour upsampling by two repeats each voxel, so along that axis two of the three taps read the same voxel
    and can be added: the last two for even output voxels, the first two for odd ones. A transposed convolution of
    stride two applies its odd taps to even output voxels and its even taps to odd ones, four taps in all. Along an axis
    that is not upsampled it applies the three taps in reverse order. In full precision, so that each tap is rounded
    once.
    """
    return _add_neighbours(full_precision(weight).flip(2, 3, 4), strides, padding=1).transpose(0, 1)


def unfolded(grad: Tensor, strides: Strides) -> Tensor:
    """Return the gradient of the 3x3x3 kernel from that of its folded form."""
    return _add_neighbours(grad.transpose(0, 1), strides, padding=0).flip(2, 3, 4)


def _add_neighbours(taps: Tensor, strides: Strides, padding: int) -> Tensor:
    """Add each tap to the next one, along the axes with stride two, with `padding` zeros at both ends.

    By slices: on a CPU, pooling takes twenty times as long, a seventh of a training step with 128 channels.
    """
    doubled = [axis for axis, stride in enumerate(strides, start=2) if stride == 2]
    taps = F.pad(taps, [padding * (axis in doubled) for axis in (4, 4, 3, 3, 2, 2)])
    for axis in doubled:
        count = taps.shape[axis] - 1
        taps = taps.narrow(axis, 0, count) + taps.narrow(axis, 1, count)
    return taps


class UpsampledRows(RowSource):
    """The upsampled and convolved volume, computed row by row from the small one.

    At inference, the largest tensor of a decoder then never exists as a whole.
    """

    def __init__(self, x: Volume, weight: Tensor, bias: Tensor, strides: Strides, dtype: torch.dtype) -> None:
        self.strides = tuple(strides)
        self.x, self.dtype, self.device, self._bias = x, dtype, x.device, bias.to(dtype)
        self.layout = layout_of_volume(x)
        grid = (size * stride for size, stride in zip(x.shape[2:], strides, strict=True))
        self.shape = torch.Size((x.shape[0], weight.shape[0], *grid))
        self._kernel = folded(weight, strides).to(dtype)

    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`."""
        stride = self.strides[0]
        first, last = start // stride, -(-end // stride)
        if isinstance(self.x, Tensor) and (first, last) == (0, self.x.shape[2]):
            small, padding = self.x, 1
        else:
            # The halo is one small row on each side; the wider padding crops the output rows that belong to it.
            small, padding = rows_of(self.x, first - 1, last + 1), 1 + stride
        with torch.autocast(self.device.type, enabled=False):
            out = native.transposed_convolution(
                small.to(self.dtype), self._kernel, self._bias, self.strides, (padding, 1, 1)
            )
        return out[:, :, start - stride * first : end - stride * first]


class _UpsampleConv(torch.autograd.Function):
    """Upsampling and a 3x3x3 convolution as one transposed convolution: 8/27 of the work where each axis doubles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, strides: Strides, dtype: torch.dtype) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            source = UpsampledRows(x, weight, bias, strides, dtype)
            # On a CPU, convolutions of few channels return contiguous volumes whatever they are given.
            out = arranged(source.rows(0, source.shape[2]), source.layout)
        ctx.save_for_backward(x, weight)
        ctx.strides, ctx.dtype = strides, dtype
        return out

    @staticmethod
    @native.first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with torch.autocast(x.device.type, enabled=False):
            kernel = folded(weight, ctx.strides).to(ctx.dtype)
            grad_x, grad_kernel = native.transposed_convolution_backward(
                grad.to(ctx.dtype), x.to(ctx.dtype), kernel, (needs_x, needs_weight), ctx.strides
            )
            grad_weight = unfolded(full_precision(grad_kernel), ctx.strides) if needs_weight else None
            grad_bias = bias_grad(grad) if needs_bias else None
        return grad_x.to(x.dtype) if needs_x else None, grad_weight, grad_bias, None, None


class DownsampledRows(RowSource):
    """What `_DownsampleConv` returns, computed row by row."""

    def __init__(self, x: Volume, weight: Tensor, bias: Tensor, strides: Strides, dtype: torch.dtype) -> None:
        self.x, self.strides, self._weight, self._bias = x, tuple(strides), weight.to(dtype), bias.to(dtype)
        self.dtype, self.device, self.layout = dtype, x.device, layout_of_volume(x)
        grid = (size // stride for size, stride in zip(x.shape[2:], strides, strict=True))
        self.shape = torch.Size((x.shape[0], weight.shape[0], *grid))

    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`."""
        stride, *others = self.strides
        # Along an axis with stride one there is a row of padding before the first, along others none.
        before = 1 if stride == 1 else 0
        haloed = rows_of(self.x, stride * start - before, stride * end - before + (2 if stride == 1 else 1))
        with torch.autocast(self.device.type, enabled=False):
            out = F.conv3d(haloed.to(self.dtype), self._weight, self._bias, self.strides, (0, *others))
        wanted = [slice(s - 1, s - 1 + size) for s, size in zip(others, self.shape[3:], strict=True)]
        return out[:, :, :, *wanted].contiguous(memory_format=self.layout)


class _DownsampleConv(torch.autograd.Function):
    """A 3x3x3 convolution whose stride is one or two along each axis.

    The volume is padded by one voxel: at the end of an axis with stride two, at both ends of an axis with stride one. A
    convolution pads both ends alike, so an axis with stride two gets two voxels at each end, and its first output is
    dropped. That way the volume is never copied into a padded one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, strides: Strides, dtype: torch.dtype) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            # The padding is as wide as the stride.
            out = F.conv3d(x.to(dtype), weight.to(dtype), bias.to(dtype), tuple(strides), tuple(strides))
        ctx.save_for_backward(x, weight)
        ctx.strides, ctx.dtype = strides, dtype
        wanted = [
            slice(stride - 1, stride - 1 + size // stride) for size, stride in zip(x.shape[2:], strides, strict=True)
        ]
        return out[:, :, *wanted].contiguous(memory_format=layout_of(out))

    @staticmethod
    @native.first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with torch.autocast(x.device.type, enabled=False):
            # With stride two, an odd axis has one output after the wanted ones, an even axis none.
            axes = list(zip(x.shape[2:], ctx.strides, strict=True))
            around = [amount for size, stride in reversed(axes) for amount in (stride - 1, size % stride)]
            wide = F.pad(grad.to(ctx.dtype), around)
            grad_x, grad_weight = native.convolution_backward(
                wide, x.to(ctx.dtype), weight.to(ctx.dtype), (needs_x, needs_weight), ctx.strides, ctx.strides
            )
            grad_bias = bias_grad(grad) if needs_bias else None
        return (
            grad_x.to(x.dtype) if needs_x else None,
            full_precision(grad_weight) if needs_weight else None,
            grad_bias,
            None,
            None,
        )


def _pairs(x: Tensor) -> Tensor:
    """View a volume of even size as (batch, channels, rows, 2, height, 2, width, 2)."""
    return x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))


def _beside(x: Tensor) -> Tensor:
    """View a volume so that it can be broadcast over the `_pairs` of a volume twice its size."""
    return x[:, :, :, None, :, None, :, None]


def _over_pairs(x: Tensor, reduce: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Tensor:
    """Reduce each block of 2x2x2 voxels to one; keep the layout."""
    if layout_of(x) == CONTIGUOUS:
        return reduce(_pairs(x), (3, 5, 7))
    # Reductions return contiguous tensors, so the channels come last in the view.
    return reduce(_pairs(x).movedim(1, -1), (2, 4, 6)).movedim(-1, 1)


class _AddUpsampled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, large: Tensor, small: Tensor) -> Tensor:
        ctx.dtypes = large.dtype, small.dtype
        dtype = torch.promote_types(*ctx.dtypes)
        out = torch.empty(large.shape, dtype=dtype, device=large.device, memory_format=layout_of(large))
        torch.add(_pairs(large), _beside(small), out=_pairs(out))
        return out

    @staticmethod
    @native.first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_large, of_small = ctx.dtypes
        needs_large, needs_small = ctx.needs_input_grad
        return (
            grad.to(of_large) if needs_large else None,
            _over_pairs(grad, torch.sum).to(of_small) if needs_small else None,
        )


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.layout = layout_of(x)
        return _over_pairs(x, torch.mean)

    @staticmethod
    @native.first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        batch, channels, *grid = grad.shape
        shape = (batch, channels, *(2 * size for size in grid))
        out = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.layout)
        _pairs(out).copy_(_beside(grad / 8))
        return (out,)


def add_upsampled(large: Tensor, small: Tensor) -> Tensor:
    """Add each voxel of `small` to the matching 2x2x2 voxels of `large`, without an enlarged copy.

    torch's own nearest-neighbour upsampling copies a channels-last volume into the other layout.
    """
    return _AddUpsampled.apply(large, small)


def halved(x: Tensor) -> Tensor:
    """Average each block of 2x2x2 voxels; every axis has an even size.

    torch's own pooling copies a channels-last volume into the other layout.
    """
    return _Halved.apply(x)


def upsample_conv(x: Tensor, conv: nn.Conv3d, strides: Strides = (2, 2, 2)) -> Tensor:
    """Enlarge each axis by its stride, by nearest-neighbour upsampling, and apply a 3x3x3 convolution."""
    return _UpsampleConv.apply(x, conv.weight, conv.bias, strides, compute_dtype(x))


def downsample_conv(x: Tensor, conv: nn.Conv3d, strides: Strides = (2, 2, 2)) -> Tensor:
    """Shrink each axis by its stride with a 3x3x3 convolution; see `_DownsampleConv` for the padding."""
    return _DownsampleConv.apply(x, conv.weight, conv.bias, strides, compute_dtype(x))
