"""GroupNorm, with or without SiLU after it, as one autograd function that saves only its low-precision input.

CUDA autocast runs GroupNorm in fp32 and keeps the fp32 copy, the normalised tensor and the activation for backward:
about ten bytes per value. This function keeps the input, at two bytes per value, and the statistics of the groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.lean import norm_operators

FULL_PRECISION = (torch.float32, torch.float64)


def compute_dtype(tensor: Any) -> torch.dtype:
    """Return the dtype in which a convolution of `tensor` would run: autocast's, when it is on."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def full_precision(tensor: Tensor) -> Tensor:
    """Return `tensor` in fp32 or fp64; the tensor itself, not a copy, if it already is."""
    return tensor if tensor.dtype in FULL_PRECISION else tensor.float()


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool, dtype: torch.dtype
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y, mean, rstd = norm_operators.group_norm(x, weight, bias, groups, eps, silu, dtype)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.silu = silu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            grad_x, *grad_affine = norm_operators.group_norm_backward(grad, x, mean, rstd, weight, bias, ctx.silu)
        return grad_x, *(part.to(weight.dtype) for part in grad_affine), None, None, None, None


def group_norm(x: Tensor, norm: nn.GroupNorm, silu: bool = False) -> Tensor:
    """Apply `norm`, and SiLU if asked to; return the dtype that the next convolution runs in."""
    return _GroupNorm.apply(x, norm.weight, norm.bias, norm.num_groups, norm.eps, silu, compute_dtype(x))
