"""The norm operators with torch's own kernels: on the CPU, in double precision, and on GPUs that cannot run Triton.

Arithmetic is in fp32 (fp64 for fp64). Low-precision tensors are converted a piece at a time, so a full-precision copy
of a whole tensor never exists. Any memory layout is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models.lean import native
from models.lean.layout import CHANNELS_LAST, layout_of
from runtime.observer import memory_observer

CPU_PIECE_VALUES = 2**16
"""Values in a piece on the CPU: 256 KiB of fp32, which stay in a core's cache from one pass to the next."""

PIECES_OF_A_GPU = 32
"""A GPU converts up to this fraction of its memory at once: almost every volume that fits it is a single piece."""


class Norm(NamedTuple):
    """A norm whose statistics are known.

    Mean and 1 / sqrt(variance + eps) of each group, (batch, groups); weight and bias; whether SiLU follows.
    """

    mean: Tensor
    rstd: Tensor
    weight: Tensor
    bias: Tensor
    silu: bool

    @property
    def groups(self) -> int:
        """Return the number of groups of channels."""
        return self.mean.shape[1]


def group_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    silu: bool,
    dtype: torch.dtype,
    layout: torch.memory_format,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a whole contiguous `x` after norm and optional SiLU, and its statistics, with torch's fused kernel."""
    full = torch.promote_types(x.dtype, torch.float32)
    weight, bias = weight.to(full), bias.to(full)
    if x.dtype == dtype == full:
        y, mean, rstd = native.group_norm(x, weight, bias, groups, eps)
        y = F.silu(y, inplace=True) if silu else y
        return y.contiguous(memory_format=layout), mean, rstd
    y = torch.empty(x.shape, dtype=dtype, device=x.device, memory_format=layout)
    mean, rstd = (x.new_empty((x.shape[0], groups), dtype=full) for _ in range(2))
    for some, part in _group_pieces(x, groups):
        values, mean[:, some], rstd[:, some] = native.group_norm(
            x[part].to(full), weight[part[1]], bias[part[1]], some.stop - some.start, eps
        )
        y[part] = F.silu(values, inplace=True) if silu else values
        del values
    return y, mean, rstd


def group_norm_backward(grad: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a whole contiguous `x`, of weight and of bias, with torch's fused kernel."""
    full = norm.mean.dtype
    norm = norm._replace(weight=norm.weight.to(full), bias=norm.bias.to(full))
    if grad.dtype == x.dtype == full:
        return _backward_of(grad, x, norm)
    grad_x, grad_weight, grad_bias = torch.empty_like(x), torch.empty_like(norm.weight), torch.empty_like(norm.bias)
    for some, part in _group_pieces(x, norm.groups):
        mean, rstd, weight, bias = norm.mean[:, some], norm.rstd[:, some], norm.weight[part[1]], norm.bias[part[1]]
        # The full-precision copies get no names here, so that the callee can free the gradient's once it is used.
        grad_x[part], grad_weight[part[1]], grad_bias[part[1]] = _backward_of(
            grad[part].to(full), x[part].to(full), Norm(mean, rstd, weight, bias, norm.silu)
        )
    return grad_x, grad_weight, grad_bias


def _backward_of(grad: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    if norm.silu:
        scale, shift = _scale_and_shift(norm)
        normed = torch.addcmul(shift, x, scale)
        grad = native.silu_backward(grad, normed, normed)
    return native.group_norm_backward(grad, x, norm.mean, norm.rstd, norm.weight)


def statistics(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(variance + eps) of each group, (batch, groups), from the moments of its pieces."""
    batch, channels, rows = x.shape[:3]
    row_step, channel_step = _steps(x)
    num_spans = -(-rows // row_step)
    if x.is_cpu and layout_of(x) == CHANNELS_LAST:
        return _refined(x, _rough_means(x, groups), eps)
    if x.is_cpu and row_step == rows and channel_step == channels:
        mean, rstd = _statistics_on_cpu(x, groups, eps)
        return _refined(x, mean, eps) if groups == channels else (mean, rstd)
    moments = x.new_empty((2, num_spans, batch, channels), dtype=torch.promote_types(x.dtype, torch.float32))
    for span, wide in enumerate(x.split(row_step, 2)):
        targets = moments[:, span].split(channel_step, 2)
        for part, target in zip(wide.split(channel_step, 1), targets, strict=True):
            target[0], target[1] = _channel_moments(part)
    # All spans but the last have equally many rows. Filled in place, because copying a list to a GPU would wait.
    share = moments.new_full((num_spans, 1, 1, 1), row_step / rows)
    share[-1] = 1 - (num_spans - 1) * row_step / rows
    means, variances = moments.unflatten(3, (groups, -1))
    mean = (share * means).sum(0).mean(2)
    if x.is_cpu and groups == channels:
        return _refined(x, mean, eps)
    variance = (share * (variances + (means - mean.unsqueeze(2)).square())).sum(0).mean(2)
    return mean, (variance + eps).rsqrt()


def _rough_means(x: Tensor, groups: int) -> Tensor:
    """Return means of groups, (batch, groups), from every eighth row; they may be off by sqrt(7) standard deviations.

    Even then, the squared distances to them add up to no more than eight times those to the mean, so `_refined` loses
    three bits at most.
    """
    some = x[:, :, ::8]
    sums = x.new_zeros((*x.shape[:2], 1, 1, 1), dtype=torch.promote_types(x.dtype, torch.float32))
    for part, total in _pieces(some, sums):
        total += part.sum((2, 3, 4), keepdim=True, dtype=sums.dtype)
    return sums.view(x.shape[0], groups, -1).mean(2) / some.shape[2:].numel()


def _refined(x: Tensor, mean: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the statistics of groups from the distances to a mean that may be slightly off.

    On a CPU, torch's instance norm sums in double precision; its GroupNorm, which the mean may come from, does not.
    """
    batch, groups = mean.shape
    channels, line = x.shape[1], _line(x)
    volume = _fold(x, line)
    sums = mean.new_zeros((2, *volume.shape[:2], 1, 1, 1))
    for part, centre, first, second in _pieces(volume, _of_channels(mean, channels, line), *sums):
        distance = part - centre
        first += distance.sum((2, 3, 4), keepdim=True)
        second += distance.square_().sum((2, 3, 4), keepdim=True)
    shift, square = _unfold_sums(sums, line).view(2, batch, groups, -1).mean(3) / x.shape[2:].numel()
    return mean + shift, (square - shift.square()).clamp_(min=0).add_(eps).rsqrt_()


def store_statistics(out: Tensor, mean: Tensor, rstd: Tensor, x: Tensor, eps: float) -> None:
    """Copy `x` into `out` and write the statistics of its groups, as many as `mean` has columns."""
    out.copy_(x)
    for target, values in zip((mean, rstd), statistics(x, mean.shape[1], eps), strict=True):
        target.copy_(values)


def _channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each channel, (batch, channels)."""
    if x.is_cpu:
        mean, rstd = _statistics_on_cpu(x, x.shape[1], 0.0)
        return mean, rstd.pow(-2)
    variance, mean = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), (2, 3, 4), correction=0)
    return mean, variance


def _statistics_on_cpu(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    # `var_mean` takes 20 times as long on a CPU.
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    _, mean, rstd = native.group_norm(values, None, None, groups, eps)
    return mean, rstd


def normalise(out: Tensor, x: Tensor, norm: Norm, rows_before: int) -> None:
    """Write the rows of `x`, after norm and optional SiLU, into `out`, and zeros into the rows around them."""
    if out.shape[2] > x.shape[2]:
        end = rows_before + x.shape[2]
        out[:, :, :rows_before] = 0
        out[:, :, end:] = 0
        out = out[:, :, rows_before:end]
    line = _line(x, out)
    x, out = _fold(x, line), _fold(out, line)
    scale, shift = _scale_and_shift(norm, line)
    in_place = out.dtype == x.dtype == scale.dtype
    for part, target, factor, offset in _pieces(x, out, scale, shift):
        # The kernel promotes each value as it reads it, so x needs no converted copy.
        values = torch.addcmul(offset, part, factor, out=target) if in_place else torch.addcmul(offset, part, factor)
        if norm.silu:
            F.silu(values, inplace=True)
        if not in_place:
            target.copy_(values)


def store_norm_sums(out: Tensor | None, sums: Tensor, grad: Tensor, x: Tensor, norm: Norm, before_silu: bool) -> None:
    """Write the sums of the gradient before SiLU and of its product with the standardised input into `sums`.

    The gradient itself, before or after SiLU, goes into `out`, if given.
    """
    targets = [] if out is None else [out]
    channels, line = x.shape[1], _line(x, grad, *targets)
    x, grad, *targets = (_fold(volume, line) for volume in (x, grad, *targets))
    totals = norm.mean.new_zeros((2, *x.shape[:2], 1, 1, 1))
    affine = _scale_and_shift(norm, line) if norm.silu else ()
    pieces = _pieces(x, grad, _of_channels(norm.mean, channels, line), *totals, *affine, *targets)
    for part, product, centre, sum_grad, sum_product, *others in pieces:
        if out is not None and not before_silu:
            others[-1].copy_(product)
        # Centred first, because sums of products with a large x would lose precision.
        centred = part - centre
        if norm.silu:
            factor, offset = others[:2]
            values = torch.addcmul(offset, part, factor)
            product = native.silu_backward(product, values, others[-1] if before_silu else values)
        elif before_silu:
            others[-1].copy_(product)
        sum_grad += product.sum((2, 3, 4), keepdim=True, dtype=totals.dtype)
        sum_product += centred.mul_(product).sum((2, 3, 4), keepdim=True)
    totals[1] *= _of_channels(norm.rstd, channels, line)
    sums.copy_(_unfold_sums(totals, line))


def norm_input_grad(out: Tensor, grad: Tensor, x: Tensor, norm: Norm, group_means: Tensor, plus: Tensor | None) -> None:
    """Write the gradient of `x`, and `plus` added to it, into `out`, which may be `grad` itself."""
    added = [] if plus is None else [plus]
    channels, line = x.shape[1], _line(x, grad, out, *added)
    x, grad, out, *added = (_fold(volume, line) for volume in (x, grad, out, *added))
    scale, shift = _scale_and_shift(norm, line)
    of_grad, of_product = group_means
    constant, of_centred = -of_grad * norm.rstd, -of_product * norm.rstd.square()
    of_groups = (_of_channels(values, channels, line) for values in (norm.mean, constant, of_centred))
    pieces = _pieces(x, grad, out, scale, shift, *of_groups, *added)
    for part, product, target, factor, offset, centre, fixed, of_part, *more in pieces:
        if norm.silu:
            values = torch.addcmul(offset, part, factor)
            product = native.silu_backward(product, values, values)
        # Centred first: a large x would lose the digits in which its values differ.
        result = torch.addcmul(fixed, part - centre, of_part)
        if more or target.dtype != result.dtype:
            result.addcmul_(product, factor)
            target.copy_(result.add_(more[0]) if more else result)
        else:
            torch.addcmul(result, product, factor, out=target)


def _line(*volumes: Tensor) -> int:
    """Return how many voxels to treat as one whose channels are theirs side by side: a line of voxels, or 1.

    A CPU combines a channels-last volume with values of channels in runs as short as the number of channels. Runs of a
    whole line take up to half the time.
    """
    joined = all(part.is_cpu and part[0].movedim(0, 3).is_contiguous() for part in volumes)
    return volumes[0].shape[4] if joined else 1


def _fold(x: Tensor, line: int) -> Tensor:
    """View a volume as (batch, line * channels, rows * height, 1, 1), unless `line` is 1."""
    return x if line == 1 else x.movedim(1, 4).flatten(3).flatten(1, 2).movedim(2, 1)[..., None, None]


def _unfold_sums(sums: Tensor, line: int) -> Tensor:
    """Add up (..., line * channels, 1, 1, 1) to (..., channels)."""
    sums = sums.flatten(-4)
    return sums if line == 1 else sums.unflatten(-1, (line, -1)).sum(-2)


def _scale_and_shift(norm: Norm, line: int = 1) -> tuple[Tensor, Tensor]:
    """Return the norm as one scale and one shift per channel, for volumes folded by `line`."""
    mean, rstd, weight, bias, _ = norm
    by_group = (mean.shape[1], -1)
    scale = rstd.unsqueeze(2) * weight.to(rstd.dtype).view(by_group)
    shift = bias.to(rstd.dtype).view(by_group) - mean.unsqueeze(2) * scale
    return _repeated(scale, line), _repeated(shift, line)


def _repeated(values: Tensor, line: int) -> Tensor:
    """Repeat (batch, groups, channels of a group) for each voxel of a line."""
    return values.unsqueeze(1).expand(-1, line, -1, -1).reshape(len(values), -1, 1, 1, 1)


def _of_channels(values: Tensor, channels: int, line: int = 1) -> Tensor:
    """Spread values of groups over their channels, to be broadcast over volumes folded by `line`."""
    batch, groups = values.shape
    return _repeated(values.unsqueeze(2).expand(batch, groups, channels // groups), line)


def _group_pieces(x: Tensor, groups: int) -> Iterator[tuple[slice, tuple[slice, slice]]]:
    """Yield pieces of whole groups: the range of groups, and the index of their values."""
    size = x.shape[1] // groups
    step = _step(piece_values(x.device), x.numel() // groups, groups)
    for start in range(0, groups, step):
        end = min(start + step, groups)
        yield slice(start, end), (slice(None), slice(start * size, end * size))


def _pieces(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield matching pieces of `x` and `others`; tensors with a single row are cut along channels only."""
    row_step, channel_step = _steps(x)
    if row_step == x.shape[2] and channel_step == x.shape[1]:
        yield x, *others
        return
    by_rows = zip(*(_split(values, row_step, 2) for values in (x, *others)), strict=False)
    for spans in by_rows if x.shape[2] > row_step else ((x, *others),):
        if channel_step == x.shape[1]:
            yield spans
        else:
            yield from zip(*(values.split(channel_step, 1) for values in spans), strict=True)


def _split(values: Tensor, step: int, axis: int) -> Iterable[Tensor]:
    """Split `values` along an axis, or repeat them for ever if they have a single row."""
    return values.split(step, axis) if values.shape[axis] > 1 else repeat(values)


def _steps(x: Tensor) -> tuple[int, int]:
    """Return the rows and channels of a piece, cut first along the outermost axis in memory."""
    limit = piece_values(x.device)
    batch, channels, rows, height, width = x.shape
    face = batch * height * width
    if x.stride(1) == 1:
        row_step = _step(limit, channels * face, rows)
        return row_step, _step(limit, row_step * face, channels)
    channel_step = _step(limit, rows * face, channels)
    return _step(limit, channel_step * face, rows), channel_step


def piece_values(device: torch.device) -> int:
    """Return how many values are converted to full precision at once."""
    if (observed := memory_observer().piece_values()) is not None:
        return observed
    if device.type == "cpu":
        return CPU_PIECE_VALUES
    return gpu_piece_values(torch.cuda.get_device_properties(device).total_memory)


def gpu_piece_values(memory_bytes: int) -> int:
    """Return how many values a GPU of this size converts to full precision at once."""
    return memory_bytes // PIECES_OF_A_GPU // 4


def _step(limit: int, values_each: int, size: int) -> int:
    return min(max(limit // values_each, 1), size)
