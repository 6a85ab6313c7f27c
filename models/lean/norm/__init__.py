"""GroupNorm, with or without SiLU after it, as one autograd function that saves only its low-precision input.

CUDA autocast runs GroupNorm in fp32 and keeps the fp32 copy, the normalised tensor and the activation for backward:
about ten bytes per value. This function keeps the input, at two bytes per value, and the statistics of the groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.lean import native
from models.lean.norm import operators
from models.lean.norm.torch_kernels import Norm

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
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, options: tuple[Any, ...]) -> Tensor:
        # One tuple: the host takes longer for each argument more.
        y, mean, rstd = operators.group_norm(x, weight, bias, *options)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        _, _, ctx.silu, *_ = options
        return y

    @staticmethod
    @native.first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        norm = Norm(mean, rstd, weight, bias, ctx.silu)
        grad_x, *grad_affine = operators.group_norm_backward(grad, x, norm)
        if weight.dtype != mean.dtype:
            grad_affine = [part.to(weight.dtype) for part in grad_affine]
        return grad_x, *grad_affine, None


def group_norm(x: Tensor, norm: nn.GroupNorm, silu: bool = False, layout: torch.memory_format | None = None) -> Tensor:
    """Apply `norm`, and SiLU if asked to; return the dtype that the next convolution runs in.

    The result has the layout of `x` if `layout` is None.
    """
    options = norm.num_groups, norm.eps, silu, compute_dtype(x), layout
    return _GroupNorm.apply(x, norm.weight, norm.bias, options)


class InstanceNorm(nn.Module):
    """`nn.InstanceNorm3d` without parameters: a GroupNorm whose groups are the channels."""

    weight: Tensor
    bias: Tensor

    def __init__(self, stock: nn.InstanceNorm3d) -> None:
        super().__init__()
        assert not stock.affine, "an instance norm with parameters has no lean counterpart"
        assert not stock.track_running_stats, "an instance norm with running statistics has no lean counterpart"
        self.channels, self.eps = stock.num_features, stock.eps
        # Not in the state dict, which is MONAI's.
        self.register_buffer("weight", torch.ones(self.channels), persistent=False)
        self.register_buffer("bias", torch.zeros(self.channels), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised volume in the dtype of `x`."""
        return _GroupNorm.apply(x, self.weight, self.bias, (self.channels, self.eps, False, x.dtype, None))
