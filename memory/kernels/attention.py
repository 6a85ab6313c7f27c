"""What attention allocates on a GPU besides its results."""

import math
from typing import Any

import torch

aten = torch.ops.aten


def attention_workspace(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes of workspace that attention's CUDA kernel allocates; 0 for other operators.

    The backward of flash attention accumulates the gradient of the query in fp32, with the channels of a head rounded
    up to 32 and the tokens to 128, plus one fp32 number per token and head.
    """
    if func._overloadpacket is not aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return 0
    batch, heads, tokens, channels = args[1].shape
    tokens = math.ceil(tokens / 128) * 128
    return 4 * batch * heads * tokens * (math.ceil(channels / 32) * 32 + 1)
