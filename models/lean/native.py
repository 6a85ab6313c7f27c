"""The only module that calls raw ATen kernels and private functions; each kernel gets the memory layout it expects.

Unlike public operators, a raw kernel may ignore strides, so a strided view gives wrong numbers and no error. In torch
2.13.0 both GroupNorm kernels ignore the strides of every argument except the forward's `x`; the kernels of SiLU and
convolution respect them. Arguments that are already contiguous are not copied.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from runtime.observer import runs_on_cpu

aten = torch.ops.aten

ATTENTION = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""The operators whose results an attention block keeps: most of the compute of many networks, for few bytes."""

Backward = Callable[..., tuple[Tensor | None, ...]]


def first_order_only(backward: Backward) -> Backward:
    """Make the backward of an autograd function refuse to be differentiated itself: raw kernels leave no graph.

    torch's `once_differentiable` refuses only if the incoming gradient needs a gradient. Otherwise it silently leaves
    this function out of a network's second derivative.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a lean block was differentiated with create_graph=True; it has first derivatives only; for second "
                "derivatives build the network with autoencoder.implementation=monai"
            )
        return backward(ctx, *grads)

    return checked


def in_dispatch_mode() -> bool:
    """Return whether a dispatch mode sees every operator; torch has no public function for it (2.13.0)."""
    return torch._C._len_torch_dispatch_stack() > 0


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Return batch, channels and voxels."""
    batch, channels, *grid = x.shape
    return batch, channels, math.prod(grid)


def _rows(x: Tensor) -> Tensor:
    """Return a contiguous (batch, channels, voxels) view or copy of `x`.

    A volume of one channel or one voxel is contiguous and channels-last at once. For five dimensions the kernel would
    then take its channels-last path, which loses the variance when the mean is large; for three it has no such path.
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


def silu_backward(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Write the gradient of `silu(x)` with respect to `x` into `out`, which may be `x` itself, and return it.

    `grad` may be of lower precision.
    """
    return aten.silu_backward.grad_input(grad, x, grad_input=out)


def transposed_convolution(
    x: Tensor, weight: Tensor, bias: Tensor, strides: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Return the transposed 3D convolution of `x`."""
    if not _adds_in_low_precision(x):
        return F.conv_transpose3d(x, weight, bias, tuple(strides), tuple(padding))
    return F.conv_transpose3d(x.float(), weight.float(), bias.float(), tuple(strides), tuple(padding)).to(x.dtype)


def transposed_convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    needs: tuple[bool, bool],
    strides: Sequence[int],
    padding: Sequence[int] = (1, 1, 1),
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` and weight of a `transposed_convolution`."""
    if _adds_in_low_precision(x):
        grad, x, weight = grad.float(), x.float(), weight.float()
    # oneDNN adds the 64 taps of all channels one after the other. In fp32 that rounds a decoder's gradient up to 2.8
    # times as far from the truth as the unfolded convolution; with channels added in four parts, up to 1.6 times.
    num_parts = 4 if runs_on_cpu(x) and x.dtype == torch.float32 else 1
    parts = [
        convolution_backward(some, x, taps, needs, strides, padding, transposed=True)
        for some, taps in zip(grad.chunk(num_parts, 1), weight.chunk(num_parts, 1), strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    of_x, of_weight = zip(*parts, strict=True)
    grad_x = functools.reduce(Tensor.add_, of_x) if needs[0] else of_x[0]
    return grad_x, torch.cat(of_weight, 1) if needs[1] else of_weight[0]


def _adds_in_low_precision(x: Tensor) -> bool:
    """Return whether ATen's own CPU kernel convolves `x`, which adds products up in the precision of its output.

    cuDNN and oneDNN add in fp32. For fake tensors the answer is no: what oneDNN supports is a matter of the process.
    """
    if not x.is_cpu or type(x) is not Tensor:
        return False
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return x.dtype in supported and not supported[x.dtype]()


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    needs: tuple[bool, bool],
    strides: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a 3D convolution's `x` and weight; `needs` says which of the two to compute."""
    grad_x, grad_weight, _ = aten.convolution_backward(
        grad, x, weight, None, list(strides), list(padding), [1] * 3, transposed, [0] * 3, 1, [*needs, False]
    )
    return grad_x, grad_weight
