"""Autograd functions of the autoencoder's largest blocks: exact, in slabs, and saving only the block's input.

They recompute the rest in backward, so they need no checkpoint; the offload hooks see the one large tensor they save.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models.lean import native, norm_operators
from models.lean.norm import compute_dtype, full_precision
from models.lean.slabs import (
    ConvolvedRows,
    NormedRows,
    RowSource,
    Statistics,
    Volume,
    bias_grad,
    convolve,
    convolve_backward,
    rows_of,
    slabs,
)

Gradients = tuple[Tensor | None, ...]


def _total(total: Tensor | None, part: Tensor) -> Tensor:
    """Add `part` to a sum in full precision."""
    part = full_precision(part)
    return part if total is None else total.add_(part)


def _statistics(x: Volume, groups: int, eps: float, rows: int) -> tuple[Tensor, Tensor]:
    """Return mean and rstd of each group, (batch, groups); rows that are computed on demand are read in slabs."""
    if isinstance(x, Tensor):
        return norm_operators.statistics(x, groups, eps)
    result = Statistics(groups, eps)
    for start, end in slabs(x, rows, x.shape[1], x.dtype):
        result.add(x.rows(start, end))
    return result.result()


def _norm_conv(
    x: Volume, parameters: tuple[Tensor, ...], groups: int, eps: float, rows: int, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the norm and convolution of `x`, and the statistics of its groups."""
    norm_weight, norm_bias, weight, bias = parameters
    with torch.autocast(x.device.type, enabled=False):
        mean, rstd = _statistics(x, groups, eps, rows)
        normed = NormedRows(x, mean, rstd, norm_weight, norm_bias, False, dtype)
        low_weight, low_bias = weight.to(dtype), bias.to(dtype)
        out = torch.empty((x.shape[0], weight.shape[0], *x.shape[2:]), dtype=dtype, device=x.device)
        for start, end in slabs(x, rows, x.shape[1], dtype):
            out[:, :, start:end] = convolve(normed.rows(start - 1, end + 1), low_weight, low_bias)
    return out, (mean, rstd)


class _NormConv(torch.autograd.Function):
    """The norm and the convolution at the end of a network."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
        *parameters, groups, eps, rows, dtype = args
        out, statistics = _norm_conv(x, tuple(parameters), groups, eps, rows, dtype)
        ctx.save_for_backward(x, *parameters, *statistics)
        ctx.rows, ctx.dtype = rows, dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, norm_weight, norm_bias, weight, _, mean, rstd = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            normed = NormedRows(x, mean, rstd, norm_weight, norm_bias, False, ctx.dtype)
            low_weight, needs = weight.to(ctx.dtype), (True, ctx.needs_input_grad[3])
            grad_x = torch.empty_like(x)
            grad_weight = grad_bias = None
            for start, end in slabs(x, ctx.rows, x.shape[1], ctx.dtype):
                part = rows_of(grad, start - 1, end + 1).to(ctx.dtype)
                grad_rows, grad_part = convolve_backward(part, normed.rows(start, end), low_weight, needs)
                if needs[1]:
                    grad_weight = _total(grad_weight, grad_part)
                    grad_bias = _total(grad_bias, bias_grad(grad[:, :, start:end]))
                grad_x[:, :, start:end] = normed.absorb(grad_rows, start, end)
            grad_norm = normed.finish()
            for start, end in slabs(x, ctx.rows, x.shape[1], ctx.dtype):
                normed.input_grad(grad_x[:, :, start:end], start, end)
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
        first = NormedRows(x, *_statistics(x, groups, eps, rows), scale1, shift1, True, dtype)
        convolved = ConvolvedRows(first, weight1, bias1)
        h: Volume = convolved
        if overwrite:
            assert isinstance(x, Tensor), "rows that are computed on demand have no place for the output"
            out = x
        else:
            out = h = torch.empty(convolved.shape, dtype=dtype, device=x.device)
        statistics = Statistics(groups, eps)
        for start, end in all_slabs:
            part = convolved.rows(start, end)
            statistics.add(part)
            if not overwrite:
                out[:, :, start:end] = part
        second = NormedRows(h, *statistics.result(), scale2, shift2, True, dtype)
        # The next slab still needs the last rows that this slab overwrites (one of h, two of x), so write them later.
        halo = 2 if overwrite else 1
        late_place, late_rows = out[:, :, :0], out[:, :, :0]
        for start, end in all_slabs:
            haloed = second.rows(start - 1, end + 1)
            late_place.copy_(late_rows)
            part = convolve(haloed, weight2, bias2)
            source = rows_of(x, start, end).to(dtype)
            part += source if shortcut is None else F.conv3d(source, shortcut, shortcut_bias)
            split = max(start, end - halo)
            out[:, :, start:split] = part[:, :, : split - start]
            late_place, late_rows = out[:, :, split:end], part[:, :, split - start :].clone()
        late_place.copy_(late_rows)
    return out, (first.mean, first.rstd, second.mean, second.rstd)


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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        with torch.autocast(grad.device.type, enabled=False):
            return *_ResidualBackward(ctx, grad).run(), None, None, None, None


class _ResidualBackward:
    """Backward of the residual block: three sweeps over the slabs, because each norm needs sums over all voxels."""

    def __init__(self, ctx: Any, grad: Tensor) -> None:
        x, *parameters, mean1, rstd1, mean2, rstd2 = ctx.saved_tensors
        scale1, shift1, weight1, bias1, scale2, shift2, weight2, _, shortcut, _ = parameters
        self.x, self.grad, self.dtype = x, grad, ctx.dtype
        self.needs_weights = ctx.needs_input_grad[3]
        self.weight1, self.bias1, self.weight2 = (part.to(ctx.dtype) for part in (weight1, bias1, weight2))
        self.shortcut = None if shortcut is None else shortcut.to(ctx.dtype)
        self.slabs = slabs(x, ctx.rows, min(weight1.shape[:2]), ctx.dtype)
        self.grad_x = torch.empty_like(x)
        self.grad_h = torch.empty_like(grad, dtype=ctx.dtype, memory_format=torch.contiguous_format)
        # The gradient of x is written after the last use of h, so h can share its memory if it fits.
        fits = weight1.shape[0] <= weight1.shape[1] and x.dtype == ctx.dtype
        self.h = self.grad_x[:, : weight1.shape[0]] if fits else torch.empty_like(self.grad_h)
        self.first = NormedRows(x, mean1, rstd1, scale1, shift1, True, ctx.dtype)
        self.second = NormedRows(self.h, mean2, rstd2, scale2, shift2, True, ctx.dtype)
        self.sums: dict[str, Tensor] = {}

    def run(self) -> Gradients:
        self._sweep_conv2()
        norm2 = self.second.finish()
        self._sweep_conv1()
        norm1 = self.first.finish()
        del self.h, self.grad_h, self.second
        self._sweep_input()
        get = self.sums.get
        shortcut_bias = get("bias2") if self.shortcut is not None else None
        of_conv1, of_conv2 = (get("weight1"), get("bias1")), (get("weight2"), get("bias2"))
        return self.grad_x, *norm1, *of_conv1, *norm2, *of_conv2, get("shortcut"), shortcut_bias

    def _add(self, name: str, part: Tensor) -> None:
        if self.needs_weights:
            self.sums[name] = _total(self.sums.get(name), part)

    def _sweep_conv2(self) -> None:
        """Recompute h, and go back through the second convolution and SiLU."""
        for start, end in self.slabs:
            self.h[:, :, start:end] = convolve(self.first.rows(start - 1, end + 1), self.weight1, self.bias1)
            grad = rows_of(self.grad, start - 1, end + 1).to(self.dtype)
            needs = (True, self.needs_weights)
            grad_rows, grad_weight = convolve_backward(grad, self.second.rows(start, end), self.weight2, needs)
            self._add("weight2", grad_weight)
            self._add("bias2", bias_grad(self.grad[:, :, start:end]))
            self.grad_h[:, :, start:end] = self.second.absorb(grad_rows, start, end)

    def _sweep_conv1(self) -> None:
        """Finish the gradient of h one row ahead of the slab, then go back through the first convolution and SiLU."""
        done, total = 0, self.x.shape[2]
        for start, end in self.slabs:
            ahead = min(end + 1, total)
            if ahead > done:
                self.second.input_grad(self.grad_h[:, :, done:ahead], done, ahead)
                done = ahead
            grad = rows_of(self.grad_h, start - 1, end + 1)
            needs = (True, self.needs_weights)
            grad_rows, grad_weight = convolve_backward(grad, self.first.rows(start, end), self.weight1, needs)
            self._add("weight1", grad_weight)
            self._add("bias1", bias_grad(self.grad_h[:, :, start:end]))
            self.grad_x[:, :, start:end] = self.first.absorb(grad_rows, start, end)

    def _sweep_input(self) -> None:
        """Finish the gradient of x and add that of the shortcut."""
        for start, end in self.slabs:
            grad = rows_of(self.grad, start, end)
            if self.shortcut is not None:
                x = rows_of(self.x, start, end).to(self.dtype)
                needs = (True, self.needs_weights)
                grad, grad_weight = native.convolution_backward(grad.to(self.dtype), x, self.shortcut, needs)
                self._add("shortcut", grad_weight)
            self.first.input_grad(self.grad_x[:, :, start:end], start, end, plus=grad)


def norm_conv(x: Volume, norm: nn.GroupNorm, conv: nn.Conv3d, rows: int) -> Tensor:
    """Apply a norm and a 3x3x3 convolution in slabs of `rows` rows."""
    assert conv.bias is not None, "MONAI's convolutions have a bias"
    parameters = (norm.weight, norm.bias, conv.weight, conv.bias)
    options = (norm.num_groups, norm.eps, rows, compute_dtype(x))
    if isinstance(x, RowSource):
        return _norm_conv(x, parameters, *options)[0]
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
