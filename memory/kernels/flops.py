"""Count the FLOPs of the operators that dominate a step: convolutions, matrix products and attention."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def count_flops(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the floating-point operations of one call; 0 for operators that torch has no formula for."""
    packet = func._overloadpacket
    # torch counts only the CUDA attention kernels; on CPU and fake tensors attention uses these two.
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape)
    if packet is aten.convolution:
        return _convolution_flops(args[0], args[1], out, is_transposed=args[6])
    if packet is aten.convolution_backward:
        grad, x, weight = args[:3]
        return sum(args[-1][:2]) * _convolution_flops(x, weight, grad, is_transposed=args[7])
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def _convolution_flops(x: Tensor, weight: Tensor, y: Tensor, is_transposed: bool) -> int:
    """Return the operations of a convolution from `x` to `y`; each of its two gradients takes as many."""
    return 2 * weight.numel() * y.shape[0] * math.prod((x if is_transposed else y).shape[2:])
