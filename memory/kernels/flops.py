"""Count the FLOPs of the operators that dominate a step: convolutions, matrix products and attention."""

import math
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_FIRST_FACTOR = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}
"""Where the first factor of a matrix product is among its arguments; the second follows it."""


def count_flops(func: torch._ops.OpOverload, args: tuple[Any, ...], out: Any) -> int:
    """Return the floating-point operations of one call; 0 for other operators.

    torch's own counter gives the same, but importing it takes a third of a second.
    """
    packet = func._overloadpacket
    # On CPU and fake tensors attention uses these two. Backward computes the weights again and four products.
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return 2 * _attention_flops(*args[:3])
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return 5 * _attention_flops(*args[1:4])
    if packet is aten.convolution:
        return _convolution_flops(args[0], args[1], out, is_transposed=args[6])
    if packet is aten.convolution_backward:
        grad, x, weight = args[:3]
        return sum(args[-1][:2]) * _convolution_flops(x, weight, grad, is_transposed=args[7])
    if packet in _FIRST_FACTOR:
        first, second = args[_FIRST_FACTOR[packet] :][:2]
        return 2 * first.numel() * second.shape[-1]
    return 0


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the operations of one of attention's matrix products: of the queries with the keys."""
    batch, heads, tokens, channels = query.shape
    assert value.shape[-1] == channels, "keys and values have as many channels"
    return 2 * batch * heads * tokens * key.shape[-2] * channels


def _convolution_flops(x: Tensor, weight: Tensor, y: Tensor, is_transposed: bool) -> int:
    """Return the operations of a convolution from `x` to `y`; each of its two gradients takes as many."""
    return 2 * weight.numel() * y.shape[0] * math.prod((x if is_transposed else y).shape[2:])
