"""GroupNorm, with or without SiLU after it, as one autograd function that saves only its low-precision input.

CUDA autocast runs GroupNorm in fp32 and keeps that fp32 copy, the normalised tensor and the activation for backward:
about ten bytes per value where two carry all the information. This function keeps the input and the groups' moments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models.lean import native

FULL_PRECISION = (torch.float32, torch.float64)


def compute_dtype(tensor: Any) -> torch.dtype:
    """Return the dtype in which a convolution of `tensor` would run: autocast's, when it is on."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def full_precision(tensor: Tensor) -> Tensor:
    """Return `tensor` in the precision of statistics; the same tensor, not a copy, when it already is."""
    return tensor if tensor.dtype in FULL_PRECISION else tensor.float()


def _needs_groups(x: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether fp32 copies are made, and so should be made one group at a time."""
    return x.dtype not in FULL_PRECISION or out_dtype != x.dtype


class _GroupNorm(torch.autograd.Function):
    """Normalise by native kernels, in fp32 and one group at a time where the input is of low precision."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool, out_dtype: torch.dtype
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            if _needs_groups(x, out_dtype):
                y, mean, rstd = _forward_by_group(x, weight, bias, groups, eps, silu, out_dtype)
            else:
                x = x.contiguous()
                y, mean, rstd = native.group_norm(x, weight, bias, groups, eps)
                y = F.silu(y, inplace=True) if silu else y
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.silu, ctx.out_dtype = silu, out_dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        with torch.autocast(x.device.type, enabled=False):
            if not _needs_groups(x, ctx.out_dtype):
                grad = grad.contiguous()
                grads = _backward_of(x, grad, weight, bias, mean, rstd, ctx.silu, needs)
            else:
                grads = _backward_by_group(x, grad, weight, bias, mean, rstd, ctx.silu, needs)
        return *grads, None, None, None, None


def _forward_by_group(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output and the groups' moments, of shape (groups, batch, 1): those of one group lie together."""
    size = x.shape[1] // groups
    y = torch.empty_like(x, dtype=out_dtype)
    stats: list[tuple[Tensor, Tensor]] = []
    parts = zip(x.split(size, 1), y.split(size, 1), weight.split(size), bias.split(size), strict=True)
    for x_part, y_part, w, b in parts:
        values = full_precision(x_part).contiguous()
        values, mean, rstd = native.group_norm(values, w, b, 1, eps)
        stats.append((mean, rstd))
        y_part.copy_(F.silu(values, inplace=True) if silu else values)
        del values
    means, rstds = zip(*stats, strict=True)
    return y, torch.stack(means), torch.stack(rstds)


def _backward_by_group(
    x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, silu: bool, needs: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    size = x.shape[1] // len(mean)
    grad_x = torch.empty_like(x) if needs[0] else None
    targets = [None] * len(mean) if grad_x is None else grad_x.split(size, 1)
    grads: list[tuple[Tensor | None, Tensor | None]] = []
    parts = zip(x.split(size, 1), grad.split(size, 1), targets, strict=True)
    of_groups = zip(weight.split(size), bias.split(size), mean.unbind(), rstd.unbind(), strict=True)
    for (x_part, grad_part, target), (w, b, m, r) in zip(parts, of_groups, strict=True):
        # The fp32 copies have no names here, nor does a tuple of arguments hold them, so that the callee can drop the
        # gradient's as soon as it is used.
        grad_values, grad_weight, grad_bias = _backward_of(
            full_precision(x_part).contiguous(), full_precision(grad_part).contiguous(), w, b, m, r, silu, needs
        )
        if target is not None:
            target.copy_(grad_values)
        del grad_values
        grads.append((grad_weight, grad_bias))
    grad_weight, grad_bias = (torch.cat(list(g)) if g[0] is not None else None for g in zip(*grads, strict=True))
    return grad_x, grad_weight, grad_bias


def _backward_of(
    x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, silu: bool, needs: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of `x`, `weight` and `bias`, all tensors being of full precision."""
    if silu:
        scale, shift = scale_and_shift(mean, rstd, weight, bias)
        normed = torch.addcmul(spread(shift), x, spread(scale))
        grad = native.silu_backward_(grad, normed)
    return native.group_norm_backward(grad, x, mean, rstd, weight, needs)


def scale_and_shift(mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normalisation as one multiplication and one addition, both of shape (batch, channels)."""
    of_groups = weight.view(mean.shape[1], -1)
    scale = rstd.unsqueeze(2) * of_groups
    shift = bias.view_as(of_groups) - mean.unsqueeze(2) * scale
    return scale.flatten(1), shift.flatten(1)


def spread(values: Tensor) -> Tensor:
    """Let (batch, channels) values broadcast over volumes."""
    return values.view(*values.shape, 1, 1, 1)


def group_norm(x: Tensor, norm: nn.GroupNorm, silu: bool = False) -> Tensor:
    """Apply `norm`, and SiLU when asked to, in the precision that the convolution after it wants."""
    return _GroupNorm.apply(x, norm.weight, norm.bias, norm.num_groups, norm.eps, silu, compute_dtype(x))
