"""Count the FLOPs of the operators that dominate a step: convolutions, matrix products and attention."""

from typing import Any

import torch
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
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
