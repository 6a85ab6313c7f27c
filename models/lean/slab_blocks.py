"""Autograd functions of the autoencoder's largest blocks: exact, in slabs, and saving only the block's input.

They recompute the rest in backward, so they need no checkpoint; the offload hooks see the one large tensor they save.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.lean import native
from models.lean.host_volumes import HostVolume, in_order, with_halos
from models.lean.layout import CHANNELS_LAST, layout_of
from models.lean.norm import compute_dtype, full_precision, operators
from models.lean.norm.affine import Norm
from models.lean.slabs import (
    ConvolvedRows,
    NormedRows,
    RowSource,
    Statistics,
    Volume,
    bias_grad,
    convolve,
    convolve_backward,
    empty,
    read,
    rows_of,
    slabs,
)

Gradients = tuple[Tensor | None, ...]

# What the residual block has gradients of, in the order of its arguments.
_GRADIENTS = (
    *("x", "scale1", "shift1", "weight1", "bias1", "scale2", "shift2", "weight2", "bias2"),
    *("shortcut", "shortcut_bias"),
)


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    """Add `part` to a sum in full precision."""
    return full_precision(part) if total is None else total.add_(part)


def statistics_of(x: Volume, groups: int, eps: float, rows: int) -> tuple[Tensor, Tensor]:
    """Return mean and rstd of each group, (batch, groups); rows that are computed on demand are read in slabs."""
    if isinstance(x, Tensor):
        return operators.statistics(x, groups, eps)
    if isinstance(x, HostVolume) and (groups, eps) in x.statistics:
        return x.statistics[groups, eps]
    all_slabs = slabs(x, rows, x.shape[1], x.dtype)
    result, source = Statistics(x, all_slabs, groups, eps), in_order(x, all_slabs[0][1])
    for start, end in all_slabs:
        result.add(read(source, start, end))
    return result.result()


def norm_conv_rows(
    x: Volume, parameters: tuple[Tensor, ...], groups: int, eps: float, rows: int, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the norm and convolution of `x`, and the statistics of its groups."""
    norm_weight, norm_bias, weight, bias = parameters
    with torch.autocast(x.device.type, enabled=False):
        mean, rstd = statistics_of(x, groups, eps, rows)
        all_slabs = slabs(x, rows, x.shape[1], dtype)
        source = with_halos(x, all_slabs[0][1])
        normed = NormedRows(source, Norm(mean, rstd, norm_weight, norm_bias, silu=False), dtype)
        low_weight, low_bias = weight.to(dtype), bias.to(dtype)
        out = empty(x, weight.shape[0], dtype)
        for start, end in all_slabs:
            out[:, :, start:end] = convolve(normed.rows(start - 1, end + 1), low_weight, low_bias)
    return out, (mean, rstd)


class _NormConv(torch.autograd.Function):
    """The norm and the convolution at the end of a network."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
        *parameters, groups, eps, rows, dtype = args
        out, statistics = norm_conv_rows(x, tuple(parameters), groups, eps, rows, dtype)
        ctx.save_for_backward(x, *parameters, *statistics)
        ctx.rows, ctx.dtype = rows, dtype
        return out

    @staticmethod
    @native.first_order_only
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, norm_weight, norm_bias, weight, _, mean, rstd = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[3:5]
        with torch.autocast(x.device.type, enabled=False):
            normed = NormedRows(x, Norm(mean, rstd, norm_weight, norm_bias, silu=False), ctx.dtype)
            low_weight = weight.to(ctx.dtype)
            grad_x, grad_weight = empty(x), None
            for start, end in slabs(x, ctx.rows, x.shape[1], ctx.dtype):
                part = rows_of(grad, start - 1, end + 1).to(ctx.dtype)
                grad_rows, grad_part = convolve_backward(
                    part, normed.rows(start, end), low_weight, (True, needs_weight)
                )
                if needs_weight:
                    grad_weight = _add(grad_weight, grad_part)
                normed.absorb(grad_rows, start, end, store=grad_x[:, :, start:end])
                del grad_rows, grad_part
            grad_norm = normed.finish()
            normed.input_grad(grad_x, 0, x.shape[2])
            grad_bias = bias_grad(grad) if needs_bias else None
        return grad_x, *grad_norm, grad_weight, grad_bias, None, None, None, None


def _residual(
    x: Volume, parameters: tuple[Any, ...], groups: int, eps: float, rows: int, dtype: torch.dtype, overwrite: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the residual block's output and the statistics of both norms.

    Names here and in backward: h = conv1(silu(norm1(x))), and the output is conv2(silu(norm2(h))) + shortcut(x).
    The output overwrites h or, with `overwrite`, x; in the latter case h is computed twice and never exists whole.
    """
    scale1, shift1, _, _, scale2, shift2, *_ = parameters
    weight1, bias1, weight2, bias2 = (part.to(dtype) for part in (*parameters[2:4], *parameters[6:8]))
    shortcut, shortcut_bias = (None if part is None else part.to(dtype) for part in parameters[8:])
    all_slabs = slabs(x, rows, min(weight1.shape[:2]), dtype)
    with torch.autocast(x.device.type, enabled=False):
        first = NormedRows(x, Norm(*statistics_of(x, groups, eps, rows), scale1, shift1, silu=True), dtype)
        convolved = ConvolvedRows(first, weight1, bias1)
        h: Volume = convolved
        if overwrite:
            assert isinstance(x, Tensor), "rows that are computed on demand have no place for the output"
            out = x
        else:
            out = h = empty(convolved)
        statistics = Statistics(convolved, all_slabs, groups, eps)
        for start, end in all_slabs:
            statistics.add(convolved.rows(start, end), store=None if overwrite else out[:, :, start:end])
        second = NormedRows(h, Norm(*statistics.result(), scale2, shift2, silu=True), dtype)
        # The next slab still needs the last rows that this slab overwrites (one of h, two of x), so write them later.
        halo = 2 if overwrite else 1
        late_place, late_rows = out[:, :, :0], out[:, :, :0]
        for start, end in all_slabs:
            haloed = second.rows(start - 1, end + 1)
            late_place.copy_(late_rows)
            part = convolve(haloed, weight2, bias2)
            del haloed
            source = read(x, start, end).to(dtype)
            if shortcut is not None:
                source = F.conv3d(source, shortcut, shortcut_bias)
            split = max(start, end - halo)
            now = split - start
            torch.add(part[:, :, :now], source[:, :, :now], out=out[:, :, start:split])
            late_place, late_rows = out[:, :, split:end], part[:, :, now:] + source[:, :, now:]
        late_place.copy_(late_rows)
    return out, (first.norm.mean, first.norm.rstd, second.norm.mean, second.norm.rstd)


class _Residual(torch.autograd.Function):
    """The residual block; saves only its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
        *parameters, groups, eps, rows, dtype = args
        out, statistics = _residual(x, tuple(parameters), groups, eps, rows, dtype, overwrite=False)
        ctx.save_for_backward(x, *parameters, *statistics)
        ctx.rows, ctx.dtype = rows, dtype
        return out

    @staticmethod
    @native.first_order_only
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        with torch.autocast(grad.device.type, enabled=False):
            return *_ResidualBackward(ctx, grad).run(), None, None, None, None


def _places(x: Tensor, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return places for the gradient of x, for h, and for the gradient of h, which may share the memory of the first.

    The gradient of x is written slab by slab after the last use of h, so h can lie in it if it fits. If h has at most
    half the channels of x, its gradient fits too: channels last, at the end of each sample, where no slab but the last
    reaches rows that are still to be read.
    """
    grad_x = empty(x)
    if x.dtype != dtype or channels > x.shape[1]:
        return grad_x, empty(x, channels, dtype), empty(x, channels, dtype)
    if 2 * channels > x.shape[1] or layout_of(grad_x) != CHANNELS_LAST:
        return grad_x, grad_x[:, :channels], empty(x, channels, dtype)
    batch, _, *grid = x.shape
    values, count = grad_x.movedim(1, -1).view(batch, -1), math.prod(grid) * channels
    first, last = (part.view(batch, *grid, channels).movedim(-1, 1) for part in (values[:, :count], values[:, -count:]))
    return grad_x, first, last


class _ResidualBackward:
    """Backward of the residual block: two sweeps over the slabs, because each norm needs sums over all voxels."""

    def __init__(self, ctx: Any, grad: Tensor) -> None:
        x, *parameters, mean1, rstd1, mean2, rstd2 = ctx.saved_tensors
        scale1, shift1, weight1, bias1, scale2, shift2, weight2, _, shortcut, _ = parameters
        self.x, self.grad, self.dtype = x, grad, ctx.dtype
        self.needs = dict(zip(_GRADIENTS, ctx.needs_input_grad, strict=False))
        self.weight1, self.bias1, self.weight2 = (part.to(ctx.dtype) for part in (weight1, bias1, weight2))
        self.shortcut = None if shortcut is None else shortcut.to(ctx.dtype)
        self.slabs = slabs(x, ctx.rows, min(weight1.shape[:2]), ctx.dtype)
        self.grad_x, self.h, self.grad_h = _places(x, weight1.shape[0], ctx.dtype)
        self.first = NormedRows(x, Norm(mean1, rstd1, scale1, shift1, silu=True), ctx.dtype)
        self.second = NormedRows(self.h, Norm(mean2, rstd2, scale2, shift2, silu=True), ctx.dtype)

    def run(self) -> Gradients:
        bias = bias_grad(self.grad) if self.needs["bias2"] or self.needs["shortcut_bias"] else None
        weight2 = self._sweep_conv2()
        norm2 = self.second.finish()
        self.second.input_grad(self.grad_h, 0, self.x.shape[2])
        bias1 = bias_grad(self.grad_h) if self.needs["bias1"] else None
        weight1 = self._sweep_conv1()
        norm1 = self.first.finish()
        del self.h, self.grad_h, self.second
        shortcut = self._input_grad()
        bias2, shortcut_bias = bias if self.needs["bias2"] else None, bias if self.needs["shortcut_bias"] else None
        return self.grad_x, *norm1, weight1, bias1, *norm2, weight2, bias2, shortcut, shortcut_bias

    def _sweep_conv2(self) -> Tensor | None:
        """Recompute h, and go back through the second convolution; return the gradient of its weight."""
        total, needs = None, (True, self.needs["weight2"])
        for start, end in self.slabs:
            self.h[:, :, start:end] = convolve(self.first.rows(start - 1, end + 1), self.weight1, self.bias1)
            grad = rows_of(self.grad, start - 1, end + 1).to(self.dtype)
            grad_rows, grad_weight = convolve_backward(grad, self.second.rows(start, end), self.weight2, needs)
            del grad
            total = _add(total, grad_weight) if self.needs["weight2"] else None
            self.second.absorb(grad_rows, start, end, store=self.grad_h[:, :, start:end])
            del grad_rows, grad_weight
        return total

    def _sweep_conv1(self) -> Tensor | None:
        """Go back through the first convolution; return the gradient of its weight."""
        total, needs = None, (True, self.needs["weight1"])
        for start, end in self.slabs:
            grad = rows_of(self.grad_h, start - 1, end + 1)
            grad_rows, grad_weight = convolve_backward(grad, self.first.rows(start, end), self.weight1, needs)
            del grad
            total = _add(total, grad_weight) if self.needs["weight1"] else None
            self.first.absorb(grad_rows, start, end, store=self.grad_x[:, :, start:end])
            del grad_rows, grad_weight  # before the next slab needs the same room
        return total

    def _input_grad(self) -> Tensor | None:
        """Finish the gradient of x and add that of the shortcut; return the gradient of the shortcut's weight."""
        if self.shortcut is None:
            self.first.input_grad(self.grad_x, 0, self.x.shape[2], plus=self.grad)
            return None
        total, needs = None, (True, self.needs["shortcut"])
        for start, end in self.slabs:
            x, grad = (rows_of(part, start, end).to(self.dtype) for part in (self.x, self.grad))
            grad, grad_weight = native.convolution_backward(grad, x, self.shortcut, needs)
            total = _add(total, grad_weight) if self.needs["shortcut"] else None
            self.first.input_grad(self.grad_x[:, :, start:end], start, end, plus=grad)
        return total


def norm_conv(x: Volume, norm: nn.GroupNorm, conv: nn.Conv3d, rows: int) -> Tensor:
    """Apply a norm and a 3x3x3 convolution in slabs of `rows` rows."""
    assert conv.bias is not None, "MONAI's convolutions have a bias"
    parameters = (norm.weight, norm.bias, conv.weight, conv.bias)
    options = (norm.num_groups, norm.eps, rows, compute_dtype(x))
    if isinstance(x, RowSource):
        return norm_conv_rows(x, parameters, *options)[0]
    return _NormConv.apply(x, *parameters, *options)


def residual(
    x: Volume,
    norms: tuple[nn.GroupNorm, nn.GroupNorm],
    convs: tuple[nn.Conv3d, nn.Conv3d],
    shortcut: nn.Conv3d | None,
    rows: int,
    overwrite: bool = False,
) -> Tensor:
    """Apply a residual block in slabs of `rows` rows; `shortcut` is its 1x1x1 convolution, if it has one.

    With `overwrite`, and if both have the same shape and dtype, the output overwrites `x`: less memory, more compute.
    """
    parameters: list[Tensor | None] = []
    for norm, conv in zip(norms, convs, strict=True):
        parameters += [norm.weight, norm.bias, conv.weight, conv.bias]
    parameters += [None, None] if shortcut is None else [shortcut.weight, shortcut.bias]
    options = (norms[0].num_groups, norms[0].eps, rows, compute_dtype(x))
    overwrite = overwrite and isinstance(x, Tensor) and shortcut is None and x.dtype == options[-1]
    if overwrite or isinstance(x, RowSource):
        return _residual(x, tuple(parameters), *options, overwrite)[0]
    return _Residual.apply(x, *parameters, *options)
