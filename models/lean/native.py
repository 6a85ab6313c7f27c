"""The only module that calls raw ATen kernels; each function passes its kernel the memory layout that it expects.

Unlike public operators, a raw kernel may ignore strides, so a strided view gives wrong numbers and no error. In torch
2.13.0 both GroupNorm kernels ignore the strides of every argument except the forward's `x`; the kernels of SiLU and
convolution respect them. Arguments that are already contiguous are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Return batch, channels and voxels."""
    batch, channels, *grid = x.shape
    return batch, channels, math.prod(grid)


def _rows(x: Tensor) -> Tensor:
    """Return a contiguous (batch, channels, voxels) view or copy of `x`.

    A volume of one channel or one voxel is contiguous and channels-last at once, and the kernel would then take its
    channels-last path, which loses the variance when the mean is large. With three axes it never does.
    """
    return x.contiguous().flatten(2)


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised `x`, and mean and rstd of its groups, both (batch, groups)."""
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    y, mean, rstd = aten.native_group_norm(_rows(x), weight, bias, *_sizes(x), groups, eps)
    return y.view(x.shape), mean, rstd


def group_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `x`, weight and bias; `mean` and `rstd` are (batch, groups)."""
    assert grad.shape == x.shape, f"gradient of shape {tuple(grad.shape)} for an output of shape {tuple(x.shape)}"
    assert mean.shape == rstd.shape == (x.shape[0], mean.shape[1]), f"moments of shape {tuple(mean.shape)}"
    dense = (part.contiguous() for part in (mean, rstd, weight))
    grad_x, grad_weight, grad_bias = aten.native_group_norm_backward(
        _rows(grad), _rows(x), *dense, *_sizes(x), mean.shape[1], [True] * 3
    )
    return grad_x.view(x.shape), grad_weight, grad_bias


def silu_backward_(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `silu(x)` with respect to `x`, in the memory of `x`; `grad` may be of lower precision."""
    return aten.silu_backward.grad_input(grad, x, grad_input=x)


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    needs: tuple[bool, bool],
    stride: int = 1,
    padding: Sequence[int] = (0, 0, 0),
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a 3D convolution's `x` and weight; `needs` says which of the two to compute."""
    grad_x, grad_weight, _ = aten.convolution_backward(
        grad, x, weight, None, [stride] * 3, list(padding), [1] * 3, False, [0] * 3, 1, [*needs, False]
    )
    return grad_x, grad_weight
