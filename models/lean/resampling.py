"""Upsampling and downsampling, each as one convolution: no enlarged or padded copy, and only the input is saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.lean import native
from models.lean.layout import layout_of
from models.lean.norm import compute_dtype, full_precision
from models.lean.slabs import RowSource, bias_grad, rows_of


def _fold(weight: Tensor) -> Tensor:
    """Return the 4x4x4 kernel of the transposed convolution that upsamples by two and convolves with `weight`.

    Nearest-neighbour upsampling repeats each voxel, so along each axis two of the three taps read the same voxel and
    can be added: the last two for even output voxels, the first two for odd ones. A transposed convolution of stride
    two applies its odd taps to even output voxels and its even taps to odd ones.
    """
    for axis in (2, 3, 4):
        first, middle, last = weight.split(1, axis)
        weight = torch.cat((last, middle + last, first + middle, first), axis)
    return weight.transpose(0, 1)


def _unfold(grad: Tensor) -> Tensor:
    """Return the gradient of the 3x3x3 kernel from that of its folded form."""
    grad = grad.transpose(0, 1)
    for axis in (2, 3, 4):
        grad = grad.narrow(axis, 0, 3) + grad.narrow(axis, 1, 3)
    return grad.flip(2, 3, 4)


class UpsampledRows(RowSource):
    """The upsampled and convolved volume, computed row by row from the small one.

    At inference, the largest tensor of a decoder then never exists as a whole.
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> None:
        self.x, self.dtype, self.device, self._bias = x, dtype, x.device, bias.to(dtype)
        self.layout = layout_of(x)
        self.shape = torch.Size((x.shape[0], weight.shape[0], *(2 * size for size in x.shape[2:])))
        # Folded in full precision, so that each tap is rounded once.
        self._kernel = _fold(full_precision(weight)).to(dtype)

    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`."""
        first, last = start // 2, (end + 1) // 2
        with torch.autocast(self.device.type, enabled=False):
            if (first, last) == (0, self.x.shape[2]):
                out = native.transposed_convolution(self.x.to(self.dtype), self._kernel, self._bias, (1, 1, 1))
            else:
                # Two more rows of padding cut off the output of the halo of one small row on each side.
                small = rows_of(self.x, first - 1, last + 1).to(self.dtype)
                out = native.transposed_convolution(small, self._kernel, self._bias, (3, 1, 1))
        return out[:, :, start - 2 * first : end - 2 * first]


class _UpsampleConv(torch.autograd.Function):
    """Upsampling by two and a 3x3x3 convolution as one transposed convolution: 8/27 of the work."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            source = UpsampledRows(x, weight, bias, dtype)
            out = source.rows(0, source.shape[2])
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        return out

    @staticmethod
    @native.first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            kernel = _fold(full_precision(weight)).to(ctx.dtype)
            grad_x, grad_kernel = native.transposed_convolution_backward(
                grad.to(ctx.dtype), x.to(ctx.dtype), kernel, (needs_x, needs_weight)
            )
            grad_weight = _unfold(full_precision(grad_kernel)) if needs_weight else None
            grad_bias = bias_grad(grad) if needs_bias else None
        return grad_x.to(x.dtype) if needs_x else None, grad_weight, grad_bias, None


class _DownsampleConv(torch.autograd.Function):
    """A 3x3x3 convolution of stride two over a volume padded by one voxel at the end of each axis.

    A convolution pads both ends alike. With two voxels at each end, its outputs after the first are the wanted ones, so
    the volume is never copied into a padded one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            out = F.conv3d(x.to(dtype), weight.to(dtype), bias.to(dtype), stride=2, padding=2)
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        wanted = [slice(1, 1 + size // 2) for size in x.shape[2:]]
        return out[:, :, *wanted].contiguous(memory_format=layout_of(out))

    @staticmethod
    @native.first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            # An odd axis has two outputs after the wanted ones, an even axis none.
            around = [amount for size in reversed(x.shape[2:]) for amount in (1, size % 2)]
            wide = F.pad(grad.to(ctx.dtype), around)
            grad_x, grad_weight = native.convolution_backward(
                wide, x.to(ctx.dtype), weight.to(ctx.dtype), (needs_x, needs_weight), 2, (2, 2, 2)
            )
            grad_bias = bias_grad(grad) if needs_bias else None
        return (
            grad_x.to(x.dtype) if needs_x else None,
            full_precision(grad_weight) if needs_weight else None,
            grad_bias,
            None,
        )


def upsample_conv(x: Tensor, conv: nn.Conv3d) -> Tensor:
    """Double each axis by nearest-neighbour upsampling and apply a 3x3x3 convolution."""
    return _UpsampleConv.apply(x, conv.weight, conv.bias, compute_dtype(x))


def downsample_conv(x: Tensor, conv: nn.Conv3d) -> Tensor:
    """Pad each axis by one voxel at its end and halve it by a 3x3x3 convolution."""
    return _DownsampleConv.apply(x, conv.weight, conv.bias, compute_dtype(x))
