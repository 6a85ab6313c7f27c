"""What attention allocates on a GPU besides its results."""

import math
from typing import Any

import torch

aten = torch.ops.aten


def attention_workspaces(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the bytes of each workspace that attention's CUDA kernel allocates; empty for other operators.

    The backward of flash attention has one fp32 number per token and head, and accumulates the gradient of the query in
    fp32, with the channels of a head rounded up to 32 and the tokens to 128.
    """
    if func._overloadpacket is not aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return ()
    batch, heads, tokens, channels = args[1].shape
    tokens = math.ceil(tokens / 128) * 128
    numbers = 4 * batch * heads * tokens
    return numbers, numbers * math.ceil(channels / 32) * 32
