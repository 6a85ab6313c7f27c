"""Upsampling and downsampling fused with their convolutions: no enlarged or padded copy; only the input is saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models.lean import native
from models.lean.norm import compute_dtype, full_precision
from models.lean.slabs import RowSource, bias_grad, rows_of, slabs

Parity = tuple[int, ...]


def _fold(weight: Tensor) -> dict[Parity, Tensor]:
    """Return the 2x2x2 kernels that compute the output voxels of each parity from the volume before upsampling.

    Nearest-neighbour upsampling repeats each voxel, so along each axis two of a kernel's three taps read the same voxel
    and can be added: the last two for even output voxels, the first two for odd ones.
    """
    kernels: dict[Parity, Tensor] = {(): weight}
    for axis in (2, 3, 4):
        for parity in list(kernels):
            first, middle, last = kernels.pop(parity).split(1, axis)
            kernels[(*parity, 0)] = torch.cat((first, middle + last), axis)
            kernels[(*parity, 1)] = torch.cat((first + middle, last), axis)
    return kernels


def _unfold(grad: Tensor, parity: Parity) -> Tensor:
    """Return the contribution of a folded kernel's gradient to that of the 3x3x3 kernel."""
    for axis, odd in enumerate(parity, start=2):
        first, last = grad.split(1, axis)
        grad = torch.cat((first, first if odd else last, last), axis)
    return grad


def _padding(parity: Parity) -> tuple[int, ...]:
    """Return the padding of the small volume, in the form of `F.pad`, for output voxels of one parity."""
    return tuple(amount for p in reversed(parity) for amount in (1 - p, p))


class UpsampledRows(RowSource):
    """The upsampled and convolved volume, computed row by row from the small one.

    At inference, the largest tensor of a decoder then never exists as a whole.
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> None:
        self.x, self.dtype, self.device, self._bias = x, dtype, x.device, bias.to(dtype)
        self.shape = torch.Size((x.shape[0], weight.shape[0], *(2 * size for size in x.shape[2:])))
        self._kernels = {parity: kernel.to(dtype) for parity, kernel in _fold(full_precision(weight)).items()}

    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`."""
        first, last = start // 2, (end + 1) // 2
        with torch.autocast(self.device.type, enabled=False):
            small = rows_of(self.x, first - 1, last + 1).to(self.dtype)
            shape = (*self.shape[:2], 2 * (last - first), *self.shape[3:])
            out = torch.empty(shape, dtype=self.dtype, device=self.device)
            for parity, kernel in self._kernels.items():
                z, y, w = parity
                padded = F.pad(small[:, :, z : z + last - first + 1], _padding(parity)[:4])
                out[:, :, z::2, y::2, w::2] = F.conv3d(padded, kernel, self._bias)
        return out[:, :, start - 2 * first : end - 2 * first]


class _UpsampleConv(torch.autograd.Function):
    """Upsampling by two and a 3x3x3 convolution as eight 2x2x2 convolutions: 8/27 of the work, no enlarged copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            source = UpsampledRows(x, weight, bias, dtype)
            out = source.rows(0, source.shape[2])
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            grad_x = torch.zeros_like(full_precision(x)) if needs_x else None
            grad_weight = torch.zeros_like(full_precision(weight)) if needs_weight else None
            grad_bias = None
            for parity, kernel in _fold(full_precision(weight)).items():
                z, y, w = parity
                part = grad[:, :, z::2, y::2, w::2].to(ctx.dtype).contiguous()
                padding = _padding(parity)
                grad_padded, grad_kernel = native.convolution_backward(
                    part, F.pad(x.to(ctx.dtype), padding), kernel.to(ctx.dtype), (needs_x, needs_weight)
                )
                if grad_x is not None:
                    grad_x += F.pad(grad_padded, [-amount for amount in padding])
                if grad_weight is not None:
                    grad_weight += _unfold(full_precision(grad_kernel), parity)
                if needs_bias:
                    total = bias_grad(part)
                    grad_bias = total if grad_bias is None else grad_bias + total
            grad_x = None if grad_x is None else grad_x.to(x.dtype)
        return grad_x, grad_weight, grad_bias, None


class _DownsampleConv(torch.autograd.Function):
    """A 3x3x3 convolution of stride two over a volume padded by one at the end of each axis, in slabs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            shape = (x.shape[0], weight.shape[0], *((size - 2) // 2 + 1 for size in x.shape[2:]))
            out = torch.empty(shape, dtype=dtype, device=x.device)
            for start, end in _output_slabs(out, rows, dtype):
                out[:, :, start:end] = F.conv3d(_padded_rows(x, start, end, dtype), weight.to(dtype), bias.to(dtype), 2)
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.dtype = rows, dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        depth, height, width = x.shape[2:]
        grad_x = torch.zeros_like(x) if needs_x else None
        grad_weight = grad_bias = shared = None
        with torch.autocast(x.device.type, enabled=False):
            for start, end in _output_slabs(grad, ctx.rows, ctx.dtype):
                part = grad[:, :, start:end].to(ctx.dtype).contiguous()
                grad_rows, grad_part = native.convolution_backward(
                    part, _padded_rows(x, start, end, ctx.dtype), weight.to(ctx.dtype), (needs_x, needs_weight), 2
                )
                if grad_x is not None:
                    # Two slabs share one row of the input: keep the first slab's part until the second adds its own.
                    if shared is not None:
                        grad_rows[:, :, :1] += shared
                    last = min(2 * end + 1, depth)
                    grad_x[:, :, 2 * start : last] = grad_rows[:, :, : last - 2 * start, :height, :width]
                    shared = grad_rows[:, :, -1:].clone()
                if needs_weight:
                    grad_part = full_precision(grad_part)
                    grad_weight = grad_part if grad_weight is None else grad_weight.add_(grad_part)
                if needs_bias:
                    total = bias_grad(part)
                    grad_bias = total if grad_bias is None else grad_bias + total
        return grad_x, grad_weight, grad_bias, None, None


def _output_slabs(out: Tensor, rows: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Return the slabs of the smaller volume that match slabs of `rows` rows of the larger one; 0: one slab."""
    if rows == 0:
        return [(0, out.shape[2])]
    return slabs(out, max(rows // 2, 1), out.shape[1], dtype)


def _padded_rows(x: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return the padded input rows of the output rows from `start` to `end`."""
    depth, height, width = x.shape[2:]
    rows = x[:, :, 2 * start : min(2 * end + 1, depth)].to(dtype)
    # An odd axis needs no padding, because its last output ends at the last voxel.
    return F.pad(rows, (0, 1 - width % 2, 0, 1 - height % 2, 0, max(2 * end + 1 - depth, 0)))


def upsample_conv(x: Tensor, conv: nn.Conv3d) -> Tensor:
    """Double each axis by nearest-neighbour upsampling and apply a 3x3x3 convolution."""
    return _UpsampleConv.apply(x, conv.weight, conv.bias, compute_dtype(x))


def downsample_conv(x: Tensor, conv: nn.Conv3d, rows: int) -> Tensor:
    """Halve each axis by a 3x3x3 convolution, in slabs of `rows` input rows; 0: whole."""
    return _DownsampleConv.apply(x, conv.weight, conv.bias, rows, compute_dtype(x))
