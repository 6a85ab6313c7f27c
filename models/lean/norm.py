"""GroupNorm, with or without SiLU after it, as one autograd function that saves only its low-precision input.

CUDA autocast runs GroupNorm in fp32 and keeps that fp32 copy, the normalised tensor and the activation for backward:
about ten bytes per value where two carry all the information. This function keeps the input and the groups' moments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.group_norm import compute_dtype
from models.lean import norm_operators


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool, dtype: torch.dtype
    ) -> Tensor:
        y, mean, rstd = norm_operators.group_norm(x, weight, bias, groups, eps, silu, dtype)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.silu = silu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        grad_x, *of_affine = norm_operators.group_norm_backward(grad, x, mean, rstd, weight, bias, ctx.silu)
        return grad_x, *(part.to(weight.dtype) for part in of_affine), None, None, None, None


def group_norm(x: Tensor, norm: nn.GroupNorm, silu: bool = False) -> Tensor:
    """Apply `norm`, and SiLU when asked to, in the precision that the convolution after it wants."""
    return _GroupNorm.apply(x, norm.weight, norm.bias, norm.num_groups, norm.eps, silu, compute_dtype(x))
